"""Plans of parallelize_module on gloo: torch's local shapes, one device's numbers, and no more
communication than DTensor's.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import launch
from parallel_plans import CASES  # type: ignore[import-not-found]
from plan_reshards import unbucketed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional as F

import ftp

pytestmark = pytest.mark.dist

DOCS = Path(__file__).parent.parent.parent / "docs" / "from_parallelize_module.md"


class Counted(CommDebugMode):
    """CommDebugMode with the bytes that a rank sends, as ``wire_nbytes`` counts them."""

    sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.get_total_counts()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented and self.get_total_counts() > before:
            given, n = args[0], dist.get_world_size()
            sizes = [t.numel() * t.element_size() for t in (given, out)]
            self.sent += max(sizes) * (n - 1) // n * (2 if "all_reduce" in str(func) else 1)
        return out


def _cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _by_torch(case, model, mesh, tokens, targets):
    """The loss, whole gradients, local shapes and the communication of a step of DTensor's,
    gradients laid out as their parameters.
    """
    for module in model.modules():
        if hasattr(module, "heads"):
            module.heads //= mesh.size()  # torch's model code sees a rank's share
    parallelize_module(model, mesh, case.torch_plan or case.plan)
    mode = Counted()
    with mode:
        logits = model(tokens)
        if case.loss_parallel:
            with loss_parallel():
                loss = _cross_entropy(logits, targets)
                loss.backward()
        else:
            loss = _cross_entropy(
                logits.full_tensor() if isinstance(logits, DTensor) else logits, targets
            )
            loss.backward()
        for p in model.parameters():
            if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
    shapes = {
        name: tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape)
        for name, p in model.named_parameters()
    }
    return shapes, (mode.get_total_counts(), mode.sent)


def _measured():
    world = int(os.environ["WORLD_SIZE"])
    mesh = ftp.make_mesh(world, "tp", device_type="cpu")
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1))
    targets = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(2))
    found = {}
    for case in CASES:
        torch.manual_seed(0)
        model = case.build().double()
        specs, constraints = ftp.from_parallelize_plan(model, case.plan, mesh=mesh)
        fn, full = ftp.functionalize(model, constraints=constraints)
        full = {name: p.clone() for name, p in full.items()}
        plain, _ = ftp.functionalize(model)
        expected, value = torch.func.grad_and_value(
            lambda p, plain=plain: _cross_entropy(plain(p, tokens), targets)
        )(full)
        step = ftp.shard(lambda p, x, y, fn=fn: _cross_entropy(fn(p, x), y), mesh, specs)
        params = ftp.device_put(full, mesh, specs)
        loss, grads = step(params, tokens, targets)
        grads = ftp.device_get(grads, mesh, specs)
        error = max(
            float((loss - value).abs()),
            *(float((grads[k] - g).abs().max()) for k, g in expected.items()),
        )
        issued = unbucketed(step.lower(params, tokens, targets)).collectives
        mine = (len(issued), sum(c.wire_nbytes for c in issued))
        shapes, theirs = _by_torch(case, model, mesh, tokens, targets)
        found[case.name] = (
            error,
            {k: tuple(p.shape) for k, p in params.items()} == shapes,
            mine,
            theirs,
        )
    dist.barrier()
    dist.destroy_process_group()
    return found


def table(found) -> list[str]:
    """The rows of the docs' table."""
    rows = []
    for name, (_, _, mine, theirs) in found.items():
        rows.append(f"| `{name}` | {theirs[0]} | {theirs[1]:,} | {mine[0]} | {mine[1]:,} |")
    return rows


@pytest.mark.slow
def test_every_plan_does_the_same_with_no_more_communication():
    ranks = launch(_measured, 2, timeout=240)
    assert [r.exit for r in ranks] == [0, 0], [r.error or r.stderr[-3000:] for r in ranks]
    for rank in ranks:
        assert list(rank.value) == [case.name for case in CASES]
        for name, (error, same_shapes, mine, theirs) in rank.value.items():
            assert error < 1e-12, name
            assert same_shapes, name
            assert mine[0] <= theirs[0] and mine[1] <= theirs[1], (name, mine, theirs)
    missing = [row for row in table(ranks[0].value) if row not in DOCS.read_text().splitlines()]
    assert not missing, "docs/from_parallelize_module.md lacks\n" + "\n".join(missing)


if __name__ == "__main__":
    print("\n".join(table(launch(_measured, 2, timeout=240)[0].value)))
