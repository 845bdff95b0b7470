"""Choose the text of a rule that fits a call, without operands and results that the call lacks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ftp.rules.call import Call
from ftp.rules.dims import all_whole
from ftp.rules.notation import BATCH, Notation
from ftp.rules.rule import Rule
from ftp.torch_internals.op_types import OpOverload


def by_text(
    rules: Sequence[Rule],
    sizes: Mapping[str, str],
    wanted: str | None,
    whole_if: str | None,
    or_whole: bool,
) -> Callable[[Call], Rule]:
    def fitting(call: Call) -> Rule:
        given = [_without_absent(r, call) for r in rules]
        if wanted is not None:
            given = [_without_unwanted(r, call, call.arg(wanted)) for r in given]
        found = next((r for r in given if fits(r.notation, call)), None)
        if found is None:
            if or_whole:
                return all_whole(call, given[0].linear)
            found = given[-1]
        if whole_if is not None and call.arg(whole_if):
            found = _without_pending(found)
        return replace(found, sizes={f: call.arg(name) for f, name in sizes.items()})

    return fitting


def _without_unwanted(rule: Rule, call: Call, wanted: Sequence[bool]) -> Rule:
    """The rule with no dims, or empty ones, for results that the call does not compute."""
    n = rule.notation
    results = tuple(
        dims if want or meta.ndim else ()
        for dims, want, meta in zip(n.results, wanted, call.results, strict=True)
    )
    pending = tuple(p if want else () for p, want in zip(n.pending, wanted, strict=True))
    return replace(rule, notation=replace(n, results=results, pending=pending))


def _without_pending(rule: Rule) -> Rule:
    n = rule.notation
    summed = {f for pending in n.pending for f, _ in pending}
    pending = ((),) * len(n.results)
    return replace(rule, notation=replace(n, whole=n.whole | summed, pending=pending))


def has_optional_tensor(op: Any) -> bool:
    return isinstance(op, OpOverload) and any(
        str(a.type) == "Optional[Tensor]" for a in op._schema.arguments
    )


def _without_absent(rule: Rule, call: Call) -> Rule:
    """The rule without the operands of optional arguments that the call does not give."""
    names = [a.name for a in call.target._schema.arguments if "Tensor" in str(a.type)]
    operands = rule.notation.operands
    if len(names) != len(operands) or len(call.operands) == len(operands):
        return rule
    kept = [i for i, name in enumerate(names) if call.arg(name) is not None]
    linear = tuple(tuple(kept.index(i) for i in g) for g in rule.linear if set(g) <= set(kept))
    notation = replace(rule.notation, operands=tuple(operands[i] for i in kept))
    return replace(rule, notation=notation, linear=linear)


def fits(notation: Notation, call: Call) -> bool:
    """Whether the call has the text's tensors with its numbers of dims, one batch shape, and one
    size for each factor that is a whole dim.
    """
    if len(notation.operands) != len(call.operands) or len(notation.results) != len(call.results):
        return False
    sizes: dict[Any, Any] = {}
    texts, metas = (*notation.operands, *notation.results), (*call.operands, *call.results)
    for dims, meta in zip(texts, metas, strict=True):
        batch = meta.ndim - sum(dim != (BATCH,) for dim in dims)
        if batch < 0 or (batch and (BATCH,) not in dims):
            return False
        at = 0
        for dim in dims:
            width = batch if dim == (BATCH,) else 1
            size = meta.shape[at : at + width]
            at += width
            if len(dim) == 1 and sizes.setdefault(dim, size) != size:
                return False
    return True
