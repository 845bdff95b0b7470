"""A certificate's file: JSON with its SHA-256, which can be checked again anywhere."""

import hashlib
import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from ftp.certification.certificate import (
    Certificate,
    Claim,
    Operation,
    Ports,
    Recorded,
    Ref,
    Spec,
    Unreduced,
)
from ftp.certification.ranks import Ranks
from ftp.errors import CertificateError
from ftp.rules.call import Meta
from ftp.torch_internals.op_types import OpOverload

VERSION = 8
# Notes of a rank's node: the op that it belongs to, the ops of a fused update, the user's line, and
# for per-rank code the operand that it takes and the results that it gives.
NOTES = ("origin", "origins", "source", "branch", "takes", "gives", "dtypes", "shape", "strides")


def write_certificate(certificate: Certificate, path: str | os.PathLike[str]) -> None:
    text = json.dumps(_encode_certificate(certificate), separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    head = f'"ftp certificate":{VERSION},"torch":"{torch.__version__}","sha256":"{digest}"'
    Path(path).write_text(f'{{{head},"program":{text}}}')


def load_certificate(path: str | os.PathLike[str]) -> Certificate:
    """A certificate from its file, unchecked: ``ftp.certification.checker.check`` checks it.

    Raises:
        CertificateError: the file is no certificate, or was altered.
    """
    try:
        document = json.loads(Path(path).read_text())
        version = document["ftp certificate"]
        body = document["program"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as e:
        raise CertificateError(
            f"{path} is no certificate: {type(e).__name__}: {e}. ftp.certify(lowered).save(path)"
            " makes one."
        ) from e
    if version != VERSION:
        raise CertificateError(
            f"{path} is a certificate of version {version}; this is version {VERSION}. Make it"
            " again."
        )
    if (
        hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
        != document["sha256"]
    ):
        raise CertificateError(f"{path} was altered: its SHA-256 is not the one that it states.")
    return _decode_certificate(body)


def _encode_certificate(c: Certificate) -> dict[str, Any]:
    return {
        "axes": c.axes,
        "groups": c.groups,
        "donated": c.donated,
        "operations": [
            {
                "name": o.name,
                "target": _encode(o.target),
                "args": _encode(o.args),
                "kwargs": _encode(dict(o.kwargs)),
                "results": [[list(m.shape), _encode(m.dtype)] for m in o.results],
                "claims": [
                    [k.axis, k.factor, k.outer, k.extent, k.inner, k.zigzag] for k in o.claims
                ],
                "partial": o.partial,
                "spec": o.spec,
                "source": o.source,
                "ports": None if o.ports is None else [o.ports.operands, o.ports.results],
                "found": [o.found, o.linear],
                "strides": o.strides,
                "body": None if o.body is None else [_encode_node(n) for n in o.body.nodes],
            }
            for o in c.operations
        ],
        "outputs": [[_encode(ref), spec] for ref, spec in c.outputs],
        "unreduced": [c.unreduced.inputs, c.unreduced.outputs],
        "graphs": [[_encode_node(n) for n in g.nodes] for g in c.ranks.graphs],
        "ranks": [
            c.ranks.shape,
            _encode_array(c.ranks.number),
            [[_encode_array(v) for v in values] for values in c.ranks.offsets],
        ],
        "recorded": None
        if (r := c.recorded) is None
        else [r.names, [[k, v] for k, v in r.integers.items()], r.every_routing],
        "trusted": c.trusted,
    }


def _decode_certificate(body: Mapping[str, Any]) -> Certificate:
    operations = tuple(
        Operation(
            o["name"],
            _decode(o["target"]),
            _decode(o["args"]),
            _decode(o["kwargs"]),
            tuple(Meta(tuple(shape), _decode(dtype)) for shape, dtype in o["results"]),
            tuple(Claim(*k) for k in o["claims"]),
            {axis: tuple(slots) for axis, slots in o["partial"].items()},
            _spec(o["spec"]),
            o["source"],
            None
            if o["ports"] is None
            else Ports(
                tuple(map(_spec, o["ports"][0])),
                tuple((_spec(spec), tuple(axes)) for spec, axes in o["ports"][1]),
            ),
            o["found"][0],
            tuple(map(tuple, o["found"][1])),
            tuple(map(tuple, o["strides"])),
            None if o["body"] is None else _decode_graph(o["body"]),
        )
        for o in body["operations"]
    )
    outputs = tuple((_decode(ref), _spec(spec)) for ref, spec in body["outputs"])
    shape, number, offsets = body["ranks"]
    groups = {name: tuple(axes) for name, axes in body["groups"].items()}
    ranks = Ranks(
        tuple(shape),
        tuple(map(_decode_graph, body["graphs"])),
        _decode_array(number),
        tuple(tuple(map(_decode_array, values)) for values in offsets),
    )
    recorded = None
    if (found := body["recorded"]) is not None:
        names, integers, every = found
        recorded = Recorded(tuple(names), {k: tuple(v) for k, v in integers}, bool(every))
    unreduced = Unreduced(*(tuple(map(tuple, axes)) for axes in body["unreduced"]))
    donated = tuple(body["donated"])
    return Certificate(
        body["axes"],
        groups,
        operations,
        outputs,
        unreduced,
        ranks,
        donated,
        recorded,
        tuple((name, kind) for name, kind in body["trusted"]),
    )


def _spec(spec: Any) -> Spec:
    return tuple(
        tuple(
            (axis, unit, pack if isinstance(pack, int | str) else tuple(pack))
            for axis, unit, pack in dim
        )
        for dim in spec
    )


def _encode_array(values: np.ndarray) -> list[Any]:
    return [list(values.shape), values.reshape(-1).tolist()]


def _decode_array(encoded: Any) -> np.ndarray:
    shape, values = encoded
    return np.array(values, dtype=np.int64).reshape(shape)


def _encode_node(node: fx.Node) -> dict[str, Any]:
    target = node.target if node.op in ("placeholder", "output") else _encode(node.target)
    made = {
        "name": node.name,
        "op": node.op,
        "target": target,
        "args": _encode(node.args),
        "kwargs": _encode(dict(node.kwargs)),
    }
    return made | {key: node.meta[key] for key in NOTES if key in node.meta}


def _decode_graph(nodes: Sequence[Mapping[str, Any]]) -> fx.Graph:
    graph = fx.Graph()
    env: dict[str, fx.Node] = {}
    for n in nodes:
        target = n["target"] if n["op"] in ("placeholder", "output") else _decode(n["target"])
        made = graph.create_node(
            n["op"], target, _decode(n["args"], env), _decode(n["kwargs"], env), n["name"]
        )
        made.meta.update({key: n[key] for key in NOTES if key in n})
        env[n["name"]] = made
    return graph


# Arguments of ops as JSON; a type that JSON lacks is an object with one key.
_TORCH = (torch.dtype, torch.memory_format, torch.layout)


def _encode(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case complex():
            return {"complex": [value.real, value.imag]}
        case Ref():
            return {"ref": [value.name, value.index]}
        case fx.Node():
            return {"node": value.name}
        case torch.device():
            return {"device": str(value)}
        case OpOverload():
            return {"target": str(value)}
        case tuple():
            return {"tuple": [_encode(v) for v in value]}
        case list():
            return [_encode(v) for v in value]
        case dict():
            return {"dict": [[k, _encode(v)] for k, v in value.items()]}
    if isinstance(value, _TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if value is operator.getitem:
        return {"target": "getitem"}
    raise CertificateError(
        f"An argument of type {type(value).__name__} has no form in a certificate: {value!r}."
    )


def _decode(value: Any, env: Mapping[str, fx.Node] | None = None) -> Any:
    if isinstance(value, list):
        return [_decode(v, env) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    match kind:
        case "tuple":
            return tuple(_decode(v, env) for v in inner)
        case "dict":
            return {k: _decode(v, env) for k, v in inner}
        case "node":
            assert env is not None
            return env[inner]
        case "ref":
            return Ref(*inner)
        case "float":
            return float(inner)
        case "complex":
            return complex(*inner)
        case "device":
            return torch.device(inner)
        case "torch":
            found = getattr(torch, inner, None)
            if isinstance(found, _TORCH):
                return found
        case "target":
            return operator.getitem if inner == "getitem" else _op(inner)
    raise CertificateError(f"{value!r} is no part of a certificate.")


def _op(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        raise CertificateError(
            f"The op {name} is not known here: import the library that registers it."
        ) from None
