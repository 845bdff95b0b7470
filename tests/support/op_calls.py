"""Calls of ATen ops, as PyTorch's operator database makes them forward and backward and as
hypothesis draws them, and proofs on them.
"""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import op_sweep
import torch
from strategies import samples
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ftp.errors import RuleError
from ftp.rules.call import tensors
from ftp.rules.decompositions.registry import DECOMPOSITIONS
from ftp.rules.own import RULES
from ftp.rules.proof.case import Case, results_of
from ftp.rules.proof.prove import prove
from ftp.rules.proof.sandbox import Ended, apart
from ftp.rules.proof.trial import holding, resized, stated
from ftp.testing import op_inputs

aten = torch.ops.aten
STAND_INS = {
    aten._fused_rms_norm_backward.default: DECOMPOSITIONS[aten._fused_rms_norm_backward.default]
}
NAMESPACES = ("aten", "ftp", "prims")  # of the registry's own rules; tests register ops of theirs
OF_RANKS = """all_gather all_reduce all_to_all axis_index contribute cut_off enter exchange_rows
fill_up leave own_part place_part ppermute reduce_scatter"""
ELSEWHERE = {  # no kernel on this device; their rules are tested on fake tensors
    getattr(aten, f"_scaled_dot_product_{kind}_attention{way}").default
    for kind in ("flash", "efficient", "cudnn")
    for way in ("", "_backward")
} | {  # of per-rank code, whose values differ from rank to rank: tested in tests/per_rank
    getattr(torch.ops.ftp, name).default for name in OF_RANKS.split()
}
NOT_DRAWN = {  # calls of other sizes read memory that is not theirs
    aten._scaled_dot_product_flash_attention_for_cpu.default: "it takes heads that do not divide,"
    " and reads beyond them",
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: "the same",
    torch.ops.ftp.scaled_dot_product_attention_varlen.default: "its documents fit its queries",
    torch.ops.ftp.scaled_dot_product_attention_varlen_backward.default: "the same",
    torch.ops.ftp.scaled_dot_product_attention_flex.default: "its functions fit its shapes",
    torch.ops.ftp.scaled_dot_product_attention_flex_backward.default: "the same",
    aten._embedding_bag.default: "its offsets rise",
    aten._embedding_bag_forward_only.default: "the same",
    aten._embedding_bag_backward.default: "its integers come from the forward pass and must fit"
    " each other",
    aten._embedding_bag_per_sample_weights_backward.default: "the same",
    aten.reflection_pad2d_backward.default: "it takes gradients of other shapes than the padded"
    " one, and reads beyond them",
    aten.reflection_pad3d_backward.default: "the same",
    aten._weight_norm_interface.default: "it takes scales that do not fit the weight, and writes"
    " beyond them",
    aten._weight_norm_interface_backward.default: "the same",
    aten.unfold_backward.default: "it takes gradients of other shapes than the windows have, and"
    " reads beyond them",
    torch.ops.ftp.map_slices.default: "its function fits its slices",
    torch.ops.ftp.random_bits.default: "a key is two words",
    torch.ops.ftp.random_keys.default: "the same",
    aten.replication_pad3d_backward.default: "it takes gradients of other batch"
    " sizes, and reads beyond them",
    aten._pdist_backward.default: "it takes fewer distances than its rows have, and reads beyond"
    " them",
    aten.segment_reduce.default: "its lengths and offsets fit its rows",
    aten._segment_reduce_backward.default: "the same",
    aten._reshape_alias.default: "its sizes and strides are not checked",
}
LARGEST = 600  # elements of a call's operands together
SECONDS = 60  # for one child
TOGETHER = 20  # ops that one child proves
FORMS = 3  # calls of one op that differ in shapes or arguments

Call = tuple[list[Any], dict[str, Any]]


class _Recorder(TorchDispatchMode):
    """Notes every call of an op that has a rule or a decomposition."""

    def __init__(self, calls: dict[OpOverload, dict[str, Call]], forms: int):
        super().__init__()
        self.calls, self.forms = calls, forms

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = (
            self.calls.setdefault(func, {})
            if (func in RULES or func in DECOMPOSITIONS)
            and len(self.calls.get(func, ())) < self.forms
            else None
        )
        if known is not None and _small((args, kwargs)):
            copied = pytree.tree_map(
                lambda x: x.detach().clone() if isinstance(x, Tensor) else x,
                (list(args), dict(kwargs)),
            )
            known.setdefault(_form(copied), copied)
        return func(*args, **kwargs)


def _small(tree: Any) -> bool:
    found = [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]
    return sum(x.numel() for x in found) <= LARGEST and all(
        x.layout is torch.strided and type(x) is Tensor for x in found
    )


def _form(tree: Any) -> str:
    return repr(
        pytree.tree_map(lambda x: (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x, tree)
    )


def recorded(
    names: Iterable[str], forms: int = FORMS, count: int = 6
) -> dict[OpOverload, list[Call]]:
    """What the database's ops call, ``count`` samples of each, in double precision where they
    have it.
    """
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
    differentiable = [
        isinstance(x, Tensor)
        and (x.is_floating_point() or x.is_complex())
        and info.supports_autograd
        for x in leaves
    ]
    leaves = [
        x.detach().clone().requires_grad_() if d else x
        for x, d in zip(leaves, differentiable, strict=True)
    ]
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
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
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


def prove_op(
    op: OpOverload,
    calls: Sequence[Any],
    pairs: bool,
    ranks: Sequence[int] = (2, 3),
    made_up: bool = False,
) -> tuple[int, int, str]:
    """Strategies proven, calls proven, and the first failure; calls that the op itself refuses
    are left out.
    """
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
            if op not in RULES:
                if wrong := _difference(op, args, kwargs):
                    return strategies, proven, wrong
                proven += 1
                continue
            try:
                case = Case.of(op, list(args), dict(kwargs), kernel)
            except RuleError as error:
                if "no sharding rule to prove" in str(error) or made_up:
                    # Left to replication; made up by chance, of a form that the op broadcasts and
                    # no gradient formula calls.
                    continue
                return strategies, proven, str(error)
            try:
                strategies += len(prove(case, ranks, pairs, generator))
            except RuleError as error:
                return strategies, proven, str(error)
        proven += 1
    return strategies, proven, ""


def _difference(op: OpOverload, args: Any, kwargs: Any) -> str:
    """How an op's decomposition differs from it, empty where it does not."""
    expected, made = results_of(op, args, kwargs), results_of(DECOMPOSITIONS[op], args, kwargs)
    if (
        "embedding_bag" in str(op)
        and len(made) == 4
        and made[2].equal(made[3])
        and not expected[2].any()
    ):
        made = (*made[:2], *expected[2:])  # the kernel does not count for sums, nor does backward
    try:
        torch.testing.assert_close(
            made, expected, rtol=1e-6, atol=1e-7, equal_nan=True, check_stride=False
        )
    except AssertionError as error:
        return f"The decomposition of {op} differs from it: {error}"
    return ""


def missed(op: OpOverload, calls: Sequence[Any]) -> dict[str, str]:
    """Placements that hold for calls of the op, on other values too, and that its rule does not
    state; each with the shapes of a call.
    """
    found: dict[str, str] = {}
    for args, kwargs in calls:
        kernel = STAND_INS.get(op, op)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                case = Case.of(op, list(args), dict(kwargs), kernel)
                again = [_refreshed(op, case, seed) for seed in range(3)]
                results = [results_of(kernel, *sample) for sample in again]
            except Exception:  # no rule for this call, or other values are none of its
                continue
            known = {held.operands for held in stated(case.rule)}
            shapes = ", ".join(
                str(tuple(x.shape)) for x in tensors((case.args, case.kwargs), Tensor)
            )
            held = set(holding(kernel, case.args, case.kwargs, case.results))
            for sample, made in zip(again, results, strict=True):
                held &= set(holding(kernel, *sample, made))
            found |= {
                str(h): shapes
                for h in sorted(held, key=str)
                if h.operands not in known and str(h) not in found
            }
    return found


def _refreshed(op: OpOverload, case: Case, seed: int) -> Call:
    """The same call with its values in another order; integers, which may be indices, too."""
    generator = torch.Generator().manual_seed(seed)

    def fill(shape: tuple[int, ...], x: Tensor) -> Tensor:
        return x.reshape(-1)[torch.randperm(x.numel(), generator=generator)].reshape(shape)

    return resized(op, case.args, case.kwargs, {}, fill)


@dataclass(frozen=True, order=True)
class Proof:
    """What was proven of an op's rule, or of its decomposition where it has no rule.

    Attributes:
        strategies: how many.
        drawn, database: calls that hypothesis drew, and that the database makes.
        failure: the first one, empty where there is none.
    """

    strategies: int = 0
    drawn: int = 0
    database: int = 0
    failure: str = ""


def prove_apart(op: OpOverload, calls: Sequence[Any], draws: int) -> Proof:
    """In child processes, as kernels crash and hang on shards that make no sense."""
    draws = _draws(op, draws)
    _warm()

    def work(count: int) -> list[Any]:
        return _proof(op, calls, count)

    limits = {"cpu_seconds": SECONDS, "seconds": 3 * SECONDS}
    answer = apart(lambda: work(draws), **limits)
    if isinstance(answer, Ended) and isinstance(
        apart(lambda: len(drawn(op, draws)), **limits), Ended
    ):
        answer = apart(
            lambda: work(0), **limits
        )  # the op by itself, uncut, does not survive what was drawn
    if isinstance(answer, Ended):
        return Proof(failure=answer.how)
    return _proof_of(answer)


def prove_each_apart(
    ops: Sequence[OpOverload], calls: Mapping[OpOverload, Sequence[Any]], draws: int
) -> dict[OpOverload, Proof]:
    """As `prove_apart`, many ops in a child; where it does not survive, each has its own."""
    _warm()
    proofs: dict[OpOverload, Proof] = {}
    for start in range(0, len(ops), TOGETHER):
        some = ops[start : start + TOGETHER]
        answers = apart(
            lambda some=some: [_proof(op, calls.get(op, []), _draws(op, draws)) for op in some],
            cpu_seconds=SECONDS,
            seconds=3 * SECONDS,
        )
        if isinstance(answers, Ended):
            proofs |= {op: prove_apart(op, calls.get(op, []), draws) for op in some}
        else:
            proofs |= zip(some, map(_proof_of, answers), strict=True)
    return proofs


def _draws(op: OpOverload, draws: int) -> int:
    return 0 if op in ELSEWHERE or op in NOT_DRAWN else draws


def _proof(op: OpOverload, calls: Sequence[Any], draws: int) -> list[Any]:
    return [
        *prove_op(op, calls, pairs=False),
        *prove_op(op, drawn(op, draws) if draws else [], pairs=False, made_up=True),
    ]


def _proof_of(answer: list[Any]) -> Proof:
    strategies, database, failure, more, cases, wrong = answer
    return Proof(strategies + more, cases, database, failure or wrong)


@cache
def _warm() -> None:
    """What hypothesis sets up at its first draw and torch at a first call, once for all
    children.
    """
    prove_op(aten.mm.default, drawn(aten.mm.default, 2), pairs=False)
    prove_op(aten.exp.default, drawn(aten.exp.default, 2), pairs=False)


def write(proofs: Mapping[OpOverload, Proof], path: Path) -> None:
    """What ``python -m ftp ops`` reads: the ops whose rule was proven, with strategies and
    calls.
    """
    known = sorted(
        (str(op), p) for op, p in proofs.items() if not p.failure and p.drawn + p.database
    )
    proven = {op: [p.strategies, p.drawn + p.database] for op, p in known}
    lines = ",\n".join(f"  {json.dumps(op)}: {json.dumps(counts)}" for op, counts in proven.items())
    path.write_text(
        f'{{\n "torch": "{torch.__version__.split("+")[0]}",\n "proven": {{\n{lines}\n }}\n}}\n'
    )
