"""One call of an op on whole tensors, and the rule that is to be proven for it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ftp.dataclass import dataclass
from ftp.errors import RuleError
from ftp.rules.bind import bind, lookup
from ftp.rules.call import Call, Meta, replaced
from ftp.rules.rule import BoundRule, Rule
from ftp.torch_internals.op_types import OpOverload


@dataclass(frozen=True)
class Case:
    """One call on the whole, with its results and the rule that is to be proven for it."""

    op: OpOverload
    kernel: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    results: tuple[Any, ...]
    rule: BoundRule

    @classmethod
    def of(
        cls,
        op: OpOverload,
        args: list[Any],
        kwargs: dict[str, Any],
        kernel: Callable[..., Any] | None = None,
        rule: Rule | None = None,
    ) -> "Case":
        """Runs the op; ``rule`` is by default the rule stated for it."""
        kernel = kernel or op
        results = results_of(kernel, args, kwargs)
        call = call_of(op, args, kwargs, results)
        found = (
            lookup(call)
            if rule is None
            else bind(
                rule, [m.shape for m in call.operands], [m.shape for m in call.results], str(op)
            )
        )
        if found is None:
            raise RuleError(
                f"{op} has no sharding rule to prove. State one with ftp.rule(torch.ops.{op},"
                " 'operands -> results')."
            )
        case = cls(op, kernel, args, kwargs, results, found)
        for dims in (*found.operands, *found.results):
            named = [f for dim in dims for f in dim]
            if len(set(named)) < len(named):
                raise RuleError(
                    f"The rule {str(found)!r} of {op} has a factor twice in one tensor, so that a"
                    " cut of it would be two cuts."
                )
        for group in found.linear:
            if any(i >= len(found.operands) for i in group):
                raise RuleError(
                    f"The rule {str(found)!r} of {op} says that operands {group} are linear; the"
                    f" call has {len(found.operands)}."
                )
        return case


def results_of(kernel: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The op's results on copies of the arguments."""
    return as_tuple(
        kernel(*replaced(args, Tensor, Tensor.clone), **replaced(kwargs, Tensor, Tensor.clone))
    )


def call_of(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
) -> Call:
    """A call as a rule sees it."""
    given, named = replaced((tuple(args), dict(kwargs)), Tensor, Meta.of)
    return Call(op, given, named, tuple(map(Meta.of, results)))


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
