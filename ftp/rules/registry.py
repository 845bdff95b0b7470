"""The registry: the sharding rule of each aten op, how its tensor dims share factors.

A rule knows nothing of meshes, ranks, uneven shards, dtypes or cost; strategies, prices, plans,
printouts and tests are derived from it. ``forms`` has the short forms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from ftp.errors import RuleError
from ftp.rules.dims import all_whole
from ftp.rules.notation import BATCH, Notation, parse
from ftp.rules.overloads import MissingOp
from ftp.rules.rule import Call, LocalHook, Rule

# Torch has no kernels that mask and add these: no value of such a dtype is a pending reduction.
NEVER_ADDED = frozenset(
    {
        torch.uint16,
        torch.uint32,
        torch.uint64,
        *(d for d in vars(torch).values() if str(d).startswith("torch.float8")),
    }
)

Linear = Sequence[Sequence[int]]
RuleMaker = Callable[[Call], "Rule | str | None"]
RULES: dict[OpOverload, Rule | RuleMaker] = {}


def make(
    text: str,
    *,
    linear: Linear = (),
    local: LocalHook | None = None,
    sizes: Mapping[str, int] | None = None,
    decompose: bool = True,
) -> Rule:
    """A rule from its text, for functions that depend on a call's arguments."""
    return Rule(parse(text), tuple(map(tuple, linear)), local, sizes or {}, decompose)


def rule(
    *ops: "OpOverload | str",
    linear: Linear = (),
    local: LocalHook | None = None,
    sizes: Mapping[str, str] | None = None,
    wanted: str | None = None,
    whole_if: str | None = None,
    or_whole: bool = False,
    decompose: bool = True,
) -> Any:
    """State the sharding rule of ``ops`` in factor notation, or decorate a function ``(call: Call)
    -> Rule | str`` that does.

    Args:
        ops: op overloads, then the text. Of several texts, the first that fits a call's dims
            applies. A text has an operand for each tensor argument of the op; that of an optional
            argument which a call does not give is left out.
        linear: groups of operands that may be pending sums together.
        local: emits the op's local form.
        sizes: factors whose size is an argument of the op, by the argument's name.
        wanted: the argument that says which results to compute; the others have no dims.
        whole_if: an argument for which, where it is true, factors to be summed are whole.
        or_whole: whether all dims are whole in a call that no text fits; it is an error otherwise.
        decompose: whether the op may be replaced by its decomposition.

    >>> rule(torch.ops.aten.mv.default, "m k, k -> m {k}", linear=[(0,), (1,)])

    Raises:
        RuleError: where a text does not parse.
    """
    targets = [op for op in ops if not isinstance(op, str)]
    texts = [op for op in ops if isinstance(op, str)]
    if texts:
        rules = [make(t, linear=linear, local=local, decompose=decompose) for t in texts]
        optional = any(_has_optional_tensor(op) for op in targets)
        if len(rules) > 1 or sizes or wanted or whole_if or or_whole or optional:
            register(targets, _by_text(rules, sizes or {}, wanted, whole_if, or_whole))
        else:
            register(targets, rules[0])
        return None

    def decorate(maker: RuleMaker) -> RuleMaker:
        def made(call: Call) -> Rule | None:
            found = maker(call)
            return (
                make(found, linear=linear, local=local, decompose=decompose)
                if isinstance(found, str)
                else found
            )

        register(targets, made)
        return maker

    return decorate


def _by_text(
    rules: Sequence[Rule],
    sizes: Mapping[str, str],
    wanted: str | None,
    whole_if: str | None,
    or_whole: bool,
) -> RuleMaker:
    def by_text(call: Call) -> Rule:
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

    return by_text


def _without_unwanted(rule: Rule, call: Call, wanted: Sequence[bool]) -> Rule:
    """The rule with no dims for results that are not computed, or empty shapes of them."""
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


def _has_optional_tensor(op: Any) -> bool:
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
    """Whether the call has the text's tensors, of its numbers of dims, with one batch shape and
    one size for each factor that is a dim of its own.
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


def register(ops: Sequence[Any], entry: Rule | RuleMaker) -> None:
    """Enter a rule, or a function that makes one of a call; ops that torch lacks are skipped."""
    if not ops:
        raise RuleError("A rule names at least one op, such as torch.ops.aten.mm.default.")
    for op in ops:
        if isinstance(op, MissingOp):
            continue
        if not isinstance(op, OpOverload):
            raise RuleError(
                f"A rule is for an op overload such as torch.ops.aten.mm.default, not {op!r}"
                f" ({type(op).__name__})."
            )
        RULES[op] = entry
