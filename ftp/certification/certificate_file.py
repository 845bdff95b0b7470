"""A certificate's file: JSON with its SHA-256, which can be checked again anywhere."""

import hashlib
import json
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
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
# Keys of a node's ``meta`` that the file keeps: among them the op that the node belongs to, the ops
# of a fused update, the user's line, and for per-rank code its operand and its results.
NOTES = ("origin", "origins", "source", "branch", "takes", "gives", "dtypes", "shape", "strides")


def write_certificate(certificate: Certificate, path: str | os.PathLike[str]) -> None:
    text, digest = _text(_encode_certificate(certificate))
    head = f'"ftp certificate":{VERSION},"torch":"{torch.__version__}","sha256":"{digest}"'
    Path(path).write_text(f'{{{head},"program":{text}}}')


def _text(body: Any) -> tuple[str, str]:
    """The program as JSON, and the SHA-256 of the JSON."""
    text = json.dumps(body, separators=(",", ":"))
    return text, hashlib.sha256(text.encode()).hexdigest()


def load_certificate(path: str | os.PathLike[str]) -> Certificate:
    """A certificate from its file, unchecked: ``ftp.certification.checker.check`` checks it.

    Raises:
        CertificateError: the file is no certificate, or was altered.
    """
    try:
        document = json.loads(Path(path).read_text())
        version = document["ftp certificate"]
        body, digest = document["program"], document["sha256"]
    except (ValueError, RecursionError, KeyError, TypeError) as e:
        raise CertificateError(
            f"{path} is no certificate: {type(e).__name__}: {e}. ftp.certify(lowered).save(path)"
            " makes one."
        ) from e
    if version != VERSION:
        raise CertificateError(
            f"{path} is a certificate of version {version}; this is version {VERSION}. Make it"
            " again."
        )
    if _text(body)[1] != digest:
        raise CertificateError(f"{path} was altered: its SHA-256 is not the one that it states.")
    try:
        return _decode_certificate(body)
    except CertificateError:
        raise
    except Exception as e:
        raise CertificateError(
            f"{path} is no certificate: it cannot be read: {type(e).__name__}: {e}"
        ) from e


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
                "body": None if o.body is None else _encode_graph(o.body),
            }
            for o in c.operations
        ],
        "outputs": [[_encode(ref), spec] for ref, spec in c.outputs],
        "unreduced": [c.unreduced.inputs, c.unreduced.outputs],
        "graphs": [_encode_graph(g) for g in c.ranks.graphs],
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


def _encode_graph(graph: fx.Graph) -> list[dict[str, Any]]:
    return [
        {
            "name": n.name,
            "op": n.op,
            "target": n.target if n.op in ("placeholder", "output") else _encode(n.target),
            "args": _encode(n.args),
            "kwargs": _encode(dict(n.kwargs)),
            **{key: n.meta[key] for key in NOTES if key in n.meta},
        }
        for n in graph.nodes
    ]


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


def _encode(value: Any) -> Any:
    """An argument of an op as JSON; a value of a type that JSON lacks is ``{kind: content}``."""
    if isinstance(value, None | bool | int | str) or (
        isinstance(value, float) and math.isfinite(value)
    ):
        return value
    if isinstance(value, list):
        return [_encode(v) for v in value]
    if value is operator.getitem:
        return {"target": "getitem"}
    for type_, (kind, encode) in _ENCODERS.items():
        if isinstance(value, type_):
            return {kind: encode(value)}
    raise CertificateError(
        f"An argument of type {type(value).__name__} has no form in a certificate: {value!r}."
    )


_TORCH = (torch.dtype, torch.memory_format, torch.layout)
_ENCODERS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    float: ("float", repr),
    complex: ("complex", lambda x: [x.real, x.imag]),
    Ref: ("ref", lambda ref: [ref.name, ref.index]),
    fx.Node: ("node", lambda node: node.name),
    torch.device: ("device", str),
    OpOverload: ("target", str),
    tuple: ("tuple", lambda values: _encode(list(values))),
    dict: ("dict", lambda items: [[k, _encode(v)] for k, v in items.items()]),
    _TORCH: ("torch", lambda value: str(value).removeprefix("torch.")),
}


def _decode(value: Any, env: Mapping[str, fx.Node] | None = None) -> Any:
    if isinstance(value, list):
        return [_decode(v, env) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    match kind:
        case "tuple":
            return tuple(_decode(inner, env))
        case "dict":
            return {k: _decode(v, env) for k, v in inner}
        case "node":
            assert env is not None
            return env[inner]
    if kind not in _DECODERS:
        raise CertificateError(f"{value!r} is no part of a certificate.")
    return _DECODERS[kind](inner)


def _torch_constant(name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, _TORCH):
        raise CertificateError(f"torch.{name} is no part of a certificate.")
    return found


def _op(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    namespace, packet, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        raise CertificateError(
            f"The op {name} is not known here: import the library that registers it."
        ) from None


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "ref": lambda inner: Ref(*inner),
    "float": float,
    "complex": lambda inner: complex(*inner),
    "device": torch.device,
    "torch": _torch_constant,
    "target": _op,
}
