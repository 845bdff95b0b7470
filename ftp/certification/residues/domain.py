"""The residue field as a domain in which recorded programs run."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ftp.certification.residues import arithmetic as ar
from ftp.certification.residues import comparisons, ops  # noqa: F401  they fill FUNCTIONS
from ftp.certification.residues.call import FUNCTIONS, ResidueCall
from ftp.certification.residues.field import Field
from ftp.certification.residues.movements import MOVEMENTS, rounded
from ftp.certification.residues.value import (
    Blind,
    Planes,
    common_window,
    drawn,
    embed,
    move,
    separate,
    write,
)
from ftp.certification.residues.words import words
from ftp.ops.exchange import LITERAL
from ftp.torch_internals.pytree import tree_any, tree_leaves, tree_map

KNOWN = frozenset(FUNCTIONS) | MOVEMENTS
FACTORIES = words(
    """
    full ones zeros arange scalar_tensor eye linspace literal tensor new_full new_ones
    new_zeros full_like ones_like zeros_like iota
    """
)
UNINITIALISED = words("empty empty_strided empty_like empty_permuted new_empty new_empty_strided")


class Residues:
    """Runs ops on values of a residue field, and on plain tensors of integers and booleans.

    Attributes:
        blind: the names of ops that were run as unknown functions of their operands.
    """

    def __init__(self, field: Field):
        self.field = field
        self.blind: dict[str, None] = {}
        self._draws = 0

    def call(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtypes: Sequence[Any]
    ) -> Any:
        name = target._schema.name.split("::")[1]
        dtype = dtypes[0] if dtypes else torch.float32
        if name in UNINITIALISED and dtype.is_floating_point:
            return self._uninitialised(target, args, kwargs, dtype)
        if torch.Tag.nondeterministic_seeded in target.tags:
            return self._random(target, args, kwargs, dtypes)
        if name.endswith("_") and not name.startswith("__") and target._schema.is_mutable:
            return self._in_place(target, name, args, kwargs, dtype)
        holds_values = tree_any(lambda x: isinstance(x, Planes), (args, kwargs))
        if not holds_values and not dtype.is_floating_point:
            return _plain(target, args, kwargs)
        if not holds_values and (name in FACTORIES or target is LITERAL):
            return embed(self.field, _plain(target, args, dict(kwargs)), dtype)
        if name in MOVEMENTS:
            return self._moved(target, args, kwargs, dtype)
        if name in FUNCTIONS:
            return FUNCTIONS[name](
                ResidueCall(self.field, target, dtype), *args, **_accepted(kwargs)
            )
        return self._opaque(target, args, kwargs, dtypes)

    def _moved(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
    ) -> Any:
        shares = any(r.alias_info is not None for r in target._schema.returns)
        lifted = (args, _accepted(kwargs))
        if target._schema.name.split("::")[1] in ("cat", "stack", "index_copy"):
            call = ResidueCall(self.field, target, dtype)
            lifted = tree_map(
                lambda x: call.lift(x) if isinstance(x, Tensor) and not _is_index(x) else x, lifted
            )
        values = [x for x in tree_leaves(lifted) if isinstance(x, Planes)]
        # A view shares the window of its base.
        window = values[0].window if shares else common_window(values)
        found: list[list[Tensor]] = []
        is_single = True
        for i in range(self.field.planes):
            plane_args, plane_kwargs = tree_map(
                lambda x, i=i: x.planes[i] if isinstance(x, Planes) else x, lifted
            )
            made = target(*plane_args, **plane_kwargs)
            is_single = isinstance(made, Tensor)
            found.append([made] if isinstance(made, Tensor) else list(made))
        results = [Planes(list(planes), window, dtype) for planes in zip(*found, strict=True)]
        if all(x.root_of is not None for x in values):
            args, kwargs = tree_map(lambda x: x.root_of if isinstance(x, Planes) else x, lifted)
            numbers = self._moved(target, args, kwargs, dtype)
            for x, number in zip(results, [numbers] if is_single else numbers, strict=True):
                x.root_of = number
        return results[0] if is_single else results

    def _in_place(
        self,
        target: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dtype: torch.dtype,
    ) -> Any:
        x = args[0]
        if not isinstance(x, Planes):
            if tree_any(lambda v: isinstance(v, Planes), (args, kwargs)):
                raise Blind(f"{target}, which rounds numbers to integers")
            return _plain(target, args, kwargs)
        base = name.removesuffix("_")
        if base not in FUNCTIONS and base not in MOVEMENTS:
            raise Blind(f"{target}")
        if base in FUNCTIONS:
            call = ResidueCall(self.field, target, x.dtype)
            new = FUNCTIONS[base](call, *args, **_accepted(kwargs))
        else:
            packet = getattr(torch.ops.aten, base)
            new = self._moved(getattr(packet, target._overloadname), args, kwargs, x.dtype)
        write(x, Planes([p.expand(x.shape) for p in new.planes], new.window, x.dtype))
        return x

    def _uninitialised(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
    ) -> Planes:
        """Memory before it is written: numbers that nothing else holds."""
        plain = tree_map(
            lambda x: x.planes[0] if isinstance(x, Planes) else x, (args, dict(kwargs))
        )
        like: Tensor = target(*plain[0], **{**plain[1], "dtype": torch.int64})
        return self._fresh(like.shape, dtype)

    def _fresh(self, shape: Sequence[int], dtype: torch.dtype) -> Planes:
        self._draws += 1
        return self.draw(shape, -self._draws, dtype)

    def _random(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtypes: Sequence[Any]
    ) -> Any:
        """Random numbers: numbers that nothing else holds."""
        if any(not d.is_floating_point for d in dtypes):
            raise Blind(f"{target}, which draws random numbers")
        if target._schema.is_mutable:
            write(args[0], self._fresh(args[0].shape, args[0].dtype))
            return args[0]
        results = zip(_on_meta(target, args, kwargs), dtypes, strict=True)
        found = [self._fresh(like.shape, dtype) for like, dtype in results]
        return found if len(found) > 1 else found[0]

    def _opaque(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dtypes: Sequence[Any],
    ) -> Any:
        self.blind[str(target)] = None
        leaves = tree_leaves((args, dict(kwargs)))
        operands = [x for x in leaves if isinstance(x, Planes)]
        if (
            target._schema.is_mutable
            or any(not d.is_floating_point for d in dtypes)
            or not operands
        ):
            raise Blind(str(target))
        plain = [
            x.tolist() if isinstance(x, Tensor) else x for x in leaves if not isinstance(x, Planes)
        ]
        results = _on_meta(target, args, kwargs)
        found = [
            ar.opaque(self.field, f"{target} {plain} {i}", operands, r.shape)
            for i, r in enumerate(results)
        ]
        return found if len(target._schema.returns) > 1 else found[0]

    def laid_out(self, x: Any, strides: Sequence[Sequence[int]] | None) -> Any:
        """Fresh results with the strides of the program's tensors: a view of a tensor must be a
        view of its planes.
        """
        if isinstance(x, Planes):
            return self._strided(x, strides[0]) if strides else x
        if isinstance(x, list | tuple) and strides:
            return [
                self._strided(v, s) if isinstance(v, Planes) else v
                for v, s in zip(x, strides, strict=True)
            ]
        return x

    def _strided(self, x: Planes, stride: Sequence[int]) -> Planes:
        if all(p.stride() == tuple(stride) for p in x.planes):
            return x
        planes = [self.empty_strided(p, stride).copy_(p) for p in x.planes]
        return Planes(planes, x.window, x.dtype, x.root_of)

    def empty_strided(self, like: Tensor, stride: Sequence[int]) -> Tensor:
        return torch.empty_strided(like.shape, tuple(stride), dtype=like.dtype)

    # Building blocks of collectives and specs.

    def draw(self, shape: Sequence[int], key: int, dtype: torch.dtype) -> Planes:
        return drawn(self.field, shape, hash((self.field.seed, key)) & ((1 << 62) - 1), dtype)

    def add(self, a: Any, b: Any) -> Any:
        return ar.add(self.field, a, b) if isinstance(a, Planes) else a + b

    def subtract(self, a: Any, b: Any) -> Any:
        return self.add(a, ar.negate(self.field, b)) if isinstance(b, Planes) else a - b

    def multiply(self, a: Any, b: Any) -> Any:
        return ar.multiply(self.field, a, b) if isinstance(a, Planes) else a * b

    def larger(self, a: Any, b: Any) -> Any:
        return ar.larger(self.field, a, b) if isinstance(a, Planes) else torch.maximum(a, b)

    def smaller(self, a: Any, b: Any) -> Any:
        return ar.smaller(self.field, a, b) if isinstance(a, Planes) else torch.minimum(a, b)

    def scaled(self, a: Any, by: Fraction) -> Any:
        return ar.scaled(self.field, a, by.numerator, by.denominator)

    def move(self, fn: Callable[..., Tensor], *xs: Any) -> Any:
        """Data movement of values or plain tensors."""
        if all(isinstance(x, Tensor) for x in xs):
            return fn(*xs)
        return move(fn, xs)

    def separate(self, x: Any) -> Any:
        return separate(x) if isinstance(x, Planes) else x.clone()

    def write(self, x: Any, new: Any) -> None:
        if isinstance(x, Planes):
            new = rounded(ResidueCall(self.field, None, x.dtype), new, x.dtype)
            write(x, Planes([p.reshape(x.shape) for p in new.planes], new.window, x.dtype))
        else:
            x.copy_(new.reshape(x.shape))

    def storage(self, x: Any) -> int:
        return (x.planes[0] if isinstance(x, Planes) else x).untyped_storage()._cdata

    def dtype(self, x: Any) -> torch.dtype:
        return x.dtype


_IGNORED = frozenset(
    ("memory_format", "device", "layout", "pin_memory", "non_blocking", "dtype", "implicit")
)


def _accepted(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k not in _IGNORED}


def _is_index(x: Tensor) -> bool:
    return x.dtype in (torch.int64, torch.int32, torch.bool)


def _on_meta(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The results of an op on tensors without data."""
    meta: Any = tree_map(
        lambda x: (
            torch.empty(x.shape, dtype=x.dtype, device="meta")
            if isinstance(x, Planes)
            else x.to("meta")
            if isinstance(x, Tensor)
            else x
        ),
        (args, dict(kwargs)),
    )
    options = meta[1]
    if any(a.name == "device" for a in target._schema.arguments):
        options = {**options, "device": torch.device("meta")}
    found = target(*meta[0], **options)
    return [found] if isinstance(found, Tensor) else list(found)


def _plain(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if target is LITERAL:
        values, shape, dtype = args
        return torch.tensor(values, dtype=dtype).reshape(tuple(shape))
    options = dict(kwargs)
    if isinstance(options.get("device"), torch.device):
        options["device"] = torch.device("cpu")
    if isinstance(dtype := options.get("dtype"), torch.dtype) and dtype.is_floating_point:
        options["dtype"] = torch.float64
    return target(*args, **options)
