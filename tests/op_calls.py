"""Calls of ATen ops, as PyTorch's operator database makes them forward and backward and as hypothesis draws them, and proofs on them."""

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import op_sweep
import torch
from strategies import samples
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ftp.rules  # noqa: F401
from ftp.child import Ended, apart
from ftp.decompositions import DECOMPOSITIONS
from ftp.errors import RuleError
from ftp.prover import Case, prove, results_of
from ftp.registry import RULES, tensors
from ftp.testing import op_inputs
from ftp.trials import holding, stated

aten = torch.ops.aten
STAND_INS = {aten._fused_rms_norm_backward.default: DECOMPOSITIONS[aten._fused_rms_norm_backward.default]}
NOT_DRAWN = {  # calls of other sizes read memory that is not theirs
    aten._grouped_mm.default: "its offsets must rise to the number of rows",
    aten._reshape_alias.default: "its sizes and strides are not checked",
}
LARGEST = 600  # elements of a call's operands together
SECONDS = 60  # for one op
FORMS = 3  # calls of one op that differ in shapes or arguments

Call = tuple[list[Any], dict[str, Any]]


class _Recorder(TorchDispatchMode):
    """Notes every call of an op that has a rule."""

    def __init__(self, calls: dict[OpOverload, dict[str, Call]], forms: int):
        super().__init__()
        self.calls, self.forms = calls, forms

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = self.calls.setdefault(func, {}) if func in RULES and len(self.calls.get(func, ())) < self.forms else None
        if known is not None and _small((args, kwargs)):
            copied = pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (list(args), dict(kwargs)))
            known.setdefault(_form(copied), copied)
        return func(*args, **kwargs)


def _small(tree: Any) -> bool:
    found = [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]
    return sum(x.numel() for x in found) <= LARGEST and all(x.layout is torch.strided and type(x) is Tensor for x in found)


def _form(tree: Any) -> str:
    return repr(pytree.tree_map(lambda x: (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x, tree))


def recorded(names: Iterable[str], forms: int = FORMS, count: int = 6) -> dict[OpOverload, list[Call]]:
    """What the database's ops call, ``count`` samples of each, in double precision where they have it."""
    calls: dict[OpOverload, dict[str, Call]] = {}
    for name in names:
        info = op_sweep.database()[name]
        for _, sample in op_sweep.samples(name, count):
            with warnings.catch_warnings(), _Recorder(calls, forms):
                warnings.simplefilter("ignore")
                try:
                    _run(info, sample)
                except Exception:  # the sweep of the database itself reports these
                    continue
    return {op: list(found.values()) for op, found in calls.items() if found}


def _run(info: Any, sample: Any) -> None:
    leaves, tree = pytree.tree_flatten((sample.input, tuple(sample.args), sample.kwargs))
    differentiable = [isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and info.supports_autograd for x in leaves]
    leaves = [x.detach().clone().requires_grad_() if d else x for x, d in zip(leaves, differentiable, strict=True)]
    given, args, kwargs = pytree.tree_unflatten(leaves, tree)
    out = info.op(given, *args, **kwargs)
    ends = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
    inputs = [x for x, d in zip(leaves, differentiable, strict=True) if d]
    if ends and inputs:
        torch.autograd.grad(ends, inputs, [torch.ones_like(x) for x in ends], allow_unused=True)


def drawn(op: OpOverload, count: int, seed: int = 0) -> list[Call]:
    """Calls of an op that hypothesis draws after our own samples."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    found: list[Call] = []

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        print_blob=False,
    )
    @seeded(seed)
    @given(op_inputs(op, samples(op), kernel=STAND_INS.get(op)))
    def collect(sample: Any) -> None:
        found.append(sample)

    try:
        collect()
    except Exception as error:
        if type(error).__name__ not in ("Unsatisfiable", "Unsatisfied"):
            raise
    return found


def prove_op(op: OpOverload, calls: Sequence[Any], pairs: bool, ranks: Sequence[int] = (2, 3)) -> tuple[int, int, str]:
    """Strategies proven, calls proven, and the first failure; calls that the op itself refuses are left out."""
    strategies = proven = 0
    generator = torch.Generator().manual_seed(0)
    for args, kwargs in calls:
        kernel = STAND_INS.get(op, op)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results_of(kernel, args, kwargs)
            except Exception:
                continue
            try:
                case = Case.of(op, list(args), dict(kwargs), kernel)
            except RuleError as error:
                if "no sharding rule to prove" in str(error):
                    continue  # the rule leaves such calls to replication
                return strategies, proven, str(error)
            try:
                strategies += len(prove(case, ranks, pairs, generator))
            except RuleError as error:
                return strategies, proven, str(error)
        proven += 1
    return strategies, proven, ""


def missed(op: OpOverload, calls: Sequence[Any]) -> set[str]:
    """Placements that hold for a call of the op and that its rule does not state: of every call, those that no other contradicts."""
    found: set[str] = set()
    for args, kwargs in calls:
        kernel = STAND_INS.get(op, op)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                case = Case.of(op, list(args), dict(kwargs), kernel)
            except Exception:
                continue
            known = stated(case.rule)
            operands = list(tensors((case.args, case.kwargs), Tensor))
            shapes = ", ".join(str(tuple(x.shape)) for x in operands)
            for held in holding(kernel, case.args, case.kwargs, case.results):
                if held not in known and not any(held.operands == k.operands for k in known):
                    found.add(f"{held} for {shapes}")
    return found


@dataclass(frozen=True)
class Proof:
    """What was proven of one op's rule: strategies, on how many calls drawn by hypothesis and of the database; the first failure."""

    strategies: int = 0
    drawn: int = 0
    database: int = 0
    failure: str = ""


def prove_apart(op: OpOverload, calls: Sequence[Any], draws: int) -> Proof:
    """In child processes, as kernels crash and hang on shards that make no sense."""
    limits = {"cpu_seconds": SECONDS, "seconds": 3 * SECONDS}
    takes = op not in NOT_DRAWN and not isinstance(apart(lambda: len(drawn(op, draws)), **limits), Ended)
    answer = apart(lambda: [*prove_op(op, calls, pairs=False), *prove_op(op, drawn(op, draws) if takes else [], pairs=False)], **limits)
    if isinstance(answer, Ended):
        return Proof(failure=answer.how)
    strategies, database, failure, more, cases, wrong = answer
    return Proof(strategies + more, cases, database, failure or wrong)


def write(proofs: dict[str, Proof], path: Path) -> None:
    """What ``python -m ftp ops`` reads: the ops whose rule was proven, with strategies and calls."""
    proven = {op: [p.strategies, p.drawn + p.database] for op, p in sorted(proofs.items()) if not p.failure and p.drawn + p.database}
    lines = ",\n".join(f"  {json.dumps(op)}: {json.dumps(counts)}" for op, counts in proven.items())
    path.write_text(f'{{\n "torch": "{torch.__version__.split("+")[0]}",\n "proven": {{\n{lines}\n }}\n}}\n')
