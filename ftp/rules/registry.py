"""The registry: the sharding rule of each aten op, how its tensor dims share factors.

A rule knows nothing of meshes, ranks, uneven shards, dtypes or cost; strategies, prices, plans,
printouts and tests are derived from it. ``forms`` has the short forms.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ftp.errors import RuleError
from ftp.rules.call import Call
from ftp.rules.notation import parse
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
    return Rule(parse(text), tuple(map(tuple, linear)), local, sizes or {}, decompose)


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
        optional = any(has_optional_tensor(op) for op in targets)
        if len(rules) > 1 or sizes or wanted or whole_if or or_whole or optional:
            register(targets, by_text(rules, sizes or {}, wanted, whole_if, or_whole))
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
