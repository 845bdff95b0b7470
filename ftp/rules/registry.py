"""The registry: the sharding rule of each aten op, how its tensor dims share factors.

A rule knows nothing of meshes, ranks, uneven shards, dtypes or cost; strategies, prices, plans,
printouts and tests are derived from it. ``forms`` has the short forms.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from ftp.errors import RuleError
from ftp.rules.call import Call
from ftp.rules.notation import BATCH, Notation, parse
from ftp.rules.overloads import MissingOp
from ftp.rules.rule import LocalHook, Rule
from ftp.rules.texts import by_text, has_optional_tensor
from ftp.torch_internals.op_types import OpOverload

LinearGroups = Sequence[Sequence[int]]
RuleMaker = Callable[[Call], "Rule | str | None"]
RULES: dict[OpOverload, Rule | RuleMaker] = {}


def make(
    text: str,
    *,
    linear: LinearGroups = (),
    local: LocalHook | None = None,
    sizes: Mapping[str, int] | None = None,
    decompose: bool = True,
) -> Rule:
    """A rule from its text, for functions that depend on a call's arguments."""
    notation, groups = parse(text), linear_groups(linear)
    if any(i >= len(notation.operands) for group in groups for i in group):
        raise RuleError(
            f"linear={linear!r} names operands, counted from 0, that the rule {text!r} lacks."
        )
    return Rule(notation, groups, local, sizes or {}, decompose)


def linear_groups(linear: Any) -> tuple[tuple[int, ...], ...]:
    """The groups of ``linear=`` as a user gives them."""
    try:
        groups = tuple(tuple(map(operator.index, group)) for group in linear)
    except TypeError:
        groups = ((-1,),)
    if any(i < 0 for group in groups for i in group):
        raise RuleError(
            f"linear={linear!r}: give groups of operands that may be pending sums together, counted"
            " from 0, as [(0,)], or [(0, 1)] for two."
        )
    return groups


def rule(
    *ops: "OpOverload | str",
    linear: LinearGroups = (),
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
            applies. A text has an operand for each tensor argument of the op; operands of optional
            arguments that a call does not give are skipped.
        linear: groups of operands that may be pending sums together.
        local: emits the op's local form.
        sizes: factors whose size is an argument of the op, by the argument's name.
        wanted: the argument that says which results to compute; the others have no dims.
        whole_if: an argument; if it is true, factors that would be summed over are whole.
        or_whole: whether all dims are whole in a call that no text fits; otherwise it is an error.
        decompose: whether the op may be replaced by its decomposition.

    >>> import torch
    >>> rule(torch.ops.aten.mv.default, "m k, k -> m {k}", linear=[(0,), (1,)])

    Raises:
        RuleError: where a text does not parse.
    """
    targets = [op for op in ops if not isinstance(op, str)]
    texts = [op for op in ops if isinstance(op, str)]
    if texts:
        rules = [make(t, linear=linear, local=local, decompose=decompose) for t in texts]
        for op, stated in product(targets, rules):
            _check_counts(op, stated.notation)
        if not (sizes or local):
            _check_found(rules)
        optional = any(has_optional_tensor(op) for op in targets)
        if len(rules) > 1 or sizes or wanted or whole_if or or_whole or optional:
            register(targets, by_text(rules, sizes or {}, wanted, whole_if, or_whole))
        else:
            register(targets, rules[0])
        return None

    def decorate(maker: RuleMaker) -> RuleMaker:
        def made(call: Call) -> Rule | None:
            found = maker(call)
            if isinstance(found, str):
                return make(found, linear=linear, local=local, decompose=decompose)
            if not isinstance(found, Rule | None):
                raise RuleError(
                    f"The function {maker.__name__}, which states the rule of {call.target}, gives"
                    f" {found!r}; it must give a text, a Rule, or None where none holds."
                )
            return found

        register(targets, made)
        return maker

    return decorate


def _check_counts(op: Any, notation: Notation) -> None:
    """Raise for a text with more or fewer tensors than an op that always has as many."""
    if not isinstance(op, OpOverload):
        return
    given = {
        "Operand": (notation.operands, op._schema.arguments),
        "Result": (notation.results, op._schema.returns),
    }
    for what, (tensors, declared) in given.items():
        kinds = [kind for kind in (str(a.type) for a in declared) if "Tensor" in kind]
        if set(kinds) <= {"Tensor"} and len(kinds) != len(tensors):
            raise RuleError(
                f"{what}s: {len(tensors)} in the rule {str(notation)!r}, {len(kinds)} of {op}:"
                f" {op._schema}. Give the dims of each, separated by commas."
            )


def _check_found(rules: Sequence[Rule]) -> None:
    """Raise for a factor of a result that no operand has: no rank could tell its part's size."""
    for notation in (stated.notation for stated in rules):
        known = {f for dims in notation.operands for dim in dims for f in dim} | notation.whole
        new = {f for dims in notation.results for dim in dims for f in dim} - known - {BATCH}
        if new:
            raise RuleError(
                f"The rule {str(notation)!r} has {', '.join(sorted(new))} in a result and in no"
                " operand, so no rank could tell how long its part is. Write an operand's factor,"
                f" or [{min(new)}] if it is whole on every rank."
            )


def register(ops: Sequence[Any], entry: Rule | RuleMaker) -> None:
    """Register a rule, or a function from a call to a rule; ops that torch lacks are skipped."""
    if not ops:
        raise RuleError("A rule names at least one op, such as torch.ops.aten.mm.default.")
    for op in ops:
        if isinstance(op, MissingOp):
            continue
        if not isinstance(op, OpOverload):
            raise RuleError(
                f"A rule is for an op overload such as torch.ops.aten.mm.default, not {op!r}"
                f" ({type(op).__name__}). Of a custom op ns::name it is torch.ops.ns.name.default."
            )
        RULES[op] = entry
