"""Specs of a model's parameters, each with the label of what gave it."""

from collections.abc import Mapping
from typing import Any

from ftp.errors import SpecError, raise_all
from ftp.sharding.plan import unfit
from ftp.sharding.pytree import SpecRow, Specs, leaf_names
from ftp.sharding.spec import P

LabelAndSpec = tuple[str, P]


def labelled_specs(
    params: Mapping[str, Any], given: Mapping[str, LabelAndSpec], otherwise: str = ""
) -> Specs:
    """``{path: (label, spec)}`` as ``Specs`` of all parameters.

    Args:
        otherwise: the label of parameters that ``given`` lacks; they are replicated.

    Raises:
        SpecError: all specs that are longer than their tensor.
    """
    rows, failures = {}, []
    for path, name in zip(sorted(params), leaf_names(dict(params), "params"), strict=True):
        label, spec = given.get(path, (otherwise, P()))
        rows[name] = SpecRow(spec, tuple(params[path].shape), label)
        if problem := unfit(params[path], name, spec, label):
            failures.append(problem)
    raise_all(SpecError, failures)
    return Specs({path: given[path][1] if path in given else P() for path in params}, rows)
