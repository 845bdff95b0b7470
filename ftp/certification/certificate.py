"""A certificate: a program, the ranks' graphs, and a claimed layout for every op; its file is JSON
that can be checked again anywhere.

Longer than other files: the two directions of the file's format stand side by side.
"""

import hashlib
import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from ftp.certification.ranks import Coordinate as Coordinate
from ftp.certification.ranks import Ranks as Ranks
from ftp.certification.ranks import shrunk as shrunk
from ftp.errors import CertificateError
from ftp.per_rank.planned import LEAVE, collective_axis
from ftp.rules.rule import Meta, tensors

Spec = tuple[
    tuple[tuple[str, int, Any], ...], ...
]  # per dim, major to minor: axis, elements of a unit, packs (a count or sizes) or "zigzag"
VERSION = 8
# Notes of a rank's node: the op that it belongs to, the ops of a fused update, the user's line, and
# for per-rank code the operand that it takes and the results that it gives.
NOTES = ("origin", "origins", "source", "branch", "takes", "gives", "dtypes", "shape", "strides")


@dataclass(frozen=True)
class Ref:
    """A result of an operation."""

    name: str
    index: int = 0

    @property
    def key(self) -> str:
        return f"{self.name}.{self.index}"


@dataclass(frozen=True)
class Claim:
    """A claimed cut of a factor over an axis, the factor viewed as ``[outer, extent, inner]``.

    A size is an int, or ``[const, [[size, axis, n, is_zigzag], ...]]``. In a zigzag the extent is
    2n chunks, of which rank r holds chunks r and 2n-1-r.
    """

    axis: str
    factor: str
    outer: Any
    extent: Any
    inner: Any
    zigzag: bool = False


@dataclass(frozen=True)
class Ports:
    """Specs of the operands and results of per-rank code (``ftp.local``), as its user states them.

    Attributes:
        operands: their specs.
        results: their specs, and the axes over which the ranks' values are terms of a sum.
    """

    operands: tuple[Spec, ...]
    results: tuple[tuple[Spec, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Operation:
    """A line of the single-device program; ``target`` is None for an input.

    Attributes:
        claims: how its factors are cut, outer axis first.
        partial: ``{axis: operands}`` that are pending sums together.
        spec: for an input, its spec.
        ports: for per-rank code, its specs.
        body: for per-rank code, the code.
        found: a rule that trials found, for an op without a stated one; ``linear`` are its
            groups of operands.
        strides: of the results of a recorded op.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Meta, ...]
    claims: tuple[Claim, ...] = ()
    partial: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    spec: Spec = ()
    source: str = ""
    ports: Ports | None = None
    found: str = ""
    linear: tuple[tuple[int, ...], ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
    body: fx.Graph | None = None

    @property
    def operands(self) -> list[Ref]:
        return list(tensors((self.args, dict(self.kwargs)), Ref))

    def __str__(self) -> str:
        return f"{self.name} ({self.source})" if self.source else self.name


@dataclass(frozen=True)
class Unreduced:
    """The axes over which each input and each output is a pending sum of the ranks' tensors."""

    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Recorded:
    """What a proof about recorded rank programs needs beside the programs.

    Attributes:
        names: of the outputs.
        integers: of inputs that are no floats, by position: the elements as they were given.
    """

    names: tuple[str, ...]
    integers: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, repr=False)
class Certificate:
    """A program with its proof: the single-device program, the ranks' graphs, the specs, and the
    claimed cuts of every op. ``check`` needs nothing else.

    Attributes:
        axes: ``{name: size}`` of the mesh.
        groups: the axes of each process group that the ranks' graphs name.
        operations: the single-device program.
        outputs: what it returns, each with its spec.
        unreduced: the sums that are pending in inputs and outputs.
        ranks: the ranks' programs.
        donated: positions of inputs whose memory the ranks may write to.
        recorded: of ranks' programs that ftp did not write; None for those that it wrote.
        trusted: what is taken as true of per-rank code (``ftp.local``): the op, and "code", that
            the ranks run it as it is written, or "specs", that results are equal where its specs
            say so.

    >>> import ftp
    >>> mesh = ftp.AbstractMesh((2,), ("tp",))
    >>> ftp.certify(ftp.lower(torch.exp, mesh, ftp.P("tp"), torch.ones(4)))
    certificate of 2 values and ops on (tp 2), 2 ranks
    """

    axes: Mapping[str, int]
    groups: Mapping[str, tuple[str, ...]]
    operations: tuple[Operation, ...]
    outputs: tuple[tuple[Ref, Spec], ...]
    unreduced: Unreduced
    ranks: Ranks
    donated: tuple[int, ...] = ()
    recorded: "Recorded | None" = None
    trusted: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis} {size}" for axis, size in self.axes.items())
        taken = "".join(f"\n  assumed: {assumption}" for assumption in self.assumptions)
        return (
            f"certificate of {len(self.operations)} values and ops on ({mesh}),"
            f" {math.prod(self.axes.values())} ranks{taken}"
        )

    @property
    def assumptions(self) -> list[str]:
        """What is assumed: of per-rank code what is not proven, that the ranks run it as it is
        written and that results are equal where its out specs say so; that the collectives of code
        over some axes alone do what they say; and rules that trials found.

        >>> import torch, ftp
        >>> mesh, spec = ftp.AbstractMesh((2,), ("tp",)), ftp.P("tp")
        >>> total = ftp.local(lambda x: ftp.axis.all_reduce(x.sum(), "tp"), mesh, spec, ftp.P())
        >>> lowered = ftp.lower(lambda x: total(x), mesh, spec, torch.ones(4))
        >>> ftp.certify(lowered).assumptions
        []
        """
        found = {}
        for o in self.operations:
            where = f"at {o.source or 'an unknown line'}"
            if (o.name, "code") in self.trusted:
                found[f"{o.name} {where} is run on each rank as it is written"] = None
            if (o.name, "specs") in self.trusted and o.ports is not None:
                found[
                    f"{o.name} {where} returns"
                    f" {', '.join(_written(*result) for result in o.ports.results)}"
                ] = None
            if (o.name, "specs") in self.trusted and o.target is LEAVE:
                found[f"{o.name} {where} is equal on all ranks along {_claimed_equal(o)}"] = None
            if (axis := collective_axis(o.target, o.args)) is not None:
                name = str(o.target).split(".")[1]
                found[f"{name} over {axis} in per-rank code {where} does what it says"] = None
            if o.found:
                linear = f", linear in operands {', '.join(map(str, o.linear))}" if o.linear else ""
                found[
                    f"{o.target} {where} is {o.found}{linear}, as trials on small tensors found"
                ] = None
        return list(found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the certificate as JSON with its SHA-256; ``python -m ftp certify FILE`` checks
        it again.
        """
        text = json.dumps(_encode_certificate(self), separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        head = f'"ftp certificate":{VERSION},"torch":"{torch.__version__}","sha256":"{digest}"'
        document = f'{{{head},"program":{text}}}'
        Path(path).write_text(document)


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
        else [r.names, [[k, v] for k, v in r.integers.items()]],
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
        names, integers = found
        recorded = Recorded(tuple(names), {k: tuple(v) for k, v in integers})
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


def _claimed_equal(left: Operation) -> str:
    """The axes along which per-rank code claims that a value is equal on all ranks."""
    _, region, _, axes, _, _, pending = left.args
    return ", ".join(axis for axis in region if axis not in (*axes, *pending))


def _written(spec: Spec, pending: Sequence[str]) -> str:
    dims = [[repr(axis) for axis, _, _ in dim] for dim in spec]
    entries = [
        "None" if not dim else dim[0] if len(dim) == 1 else f"({', '.join(dim)})" for dim in dims
    ]
    return f"P({', '.join(entries)})" + (
        f", a pending sum over {', '.join(pending)}" if pending else ""
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
        case torch._ops.OpOverload():
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
