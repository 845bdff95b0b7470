"""Every kind of plan with one letter wrong: refused, and what is suggested first is what was
meant.
"""

import fnmatch
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from few_or_many import slow_after
from parallel_plans import CASES  # type: ignore[import-not-found]
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import ftp
from ftp import P, plans
from ftp.sharding.patterns import matches

Read = Callable[[dict[str, Any]], Any]


def typos(name: str) -> list[str]:
    """A letter left out, doubled, or swapped with the next."""
    at = len(name) // 2
    return [
        name[:at] + name[at + 1 :],
        name[:at] + name[at] + name[at:],
        name[: at - 1] + name[at] + name[at - 1] + name[at + 1 :],
    ]


def mistaken(plan: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each pattern with the plans in which one of its elements is misspelt."""
    for pattern, value in plan.items():
        elements = pattern.split(".")
        for i, element in enumerate(elements):
            if len(element) < 3 or not element.replace("_", "").isalnum():
                continue
            for wrong in dict.fromkeys(typos(element)):
                misspelt = ".".join((*elements[:i], wrong, *elements[i + 1 :]))
                if wrong != element and misspelt not in plan:
                    yield (
                        pattern,
                        {**{k: v for k, v in plan.items() if k != pattern}, misspelt: value},
                    )


def message_of(read: Read, plan: dict[str, Any]) -> str:
    with pytest.raises(ftp.FtpError) as error:
        read(plan)
    return str(error.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plans_of_parallelize_module(case):
    model = case.build()
    paths = [path for path, _ in model.named_modules()]

    def read(plan):
        return ftp.from_parallelize_plan(model, plan)

    read(case.plan)
    tried = 0
    for pattern, plan in mistaken(case.plan):
        misspelt = next(k for k in plan if k not in case.plan)
        assert not any(fnmatch.fnmatchcase(path, misspelt) for path in paths)
        assert message_of(read, plan).startswith(
            f"pattern {misspelt!r} matches no module; did you mean {pattern!r}, which matches "
        )
        tried += 1
    assert tried >= 3


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Mlp(), Mlp()]), nn.Linear(4, 4)
        self.tp_plan = {"layers.*.up": "colwise"}

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


SPECS = {
    "layers.*.up.weight": P("tp"),
    "layers.*.up.bias": P("tp"),
    "layers.*.down.weight": P(None, "tp"),
    "head.weight": P("tp"),
}
LLAMA = [f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"] + [
    f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")
]


def kinds() -> dict[str, tuple[dict[str, Any], Read]]:
    net, mesh = Net(), ftp.simulated_mesh(2, "tp")
    _, params = ftp.functionalize(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its own deprecated functions
        program = torch.export.export(net, (torch.ones(2, 4),))
    llama = {name: torch.ones(8, 8) for name in (*LLAMA, "embed_tokens.weight", "lm_head.weight")}
    styles = {
        "layers.*.up": ColwiseParallel,
        "layers.*.down": RowwiseParallel(),
        "head": ColwiseParallel,
    }
    names = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "replicate"}
    return {
        "plan": (SPECS, lambda plan: ftp.plan(params, plan)),
        "plans.llama": (dict(plans.llama({"head_dim": 4})), lambda plan: ftp.plan(llama, plan)),
        "constraints": (
            {"layers.*.up": P(), "head": P()},
            lambda plan: ftp.functionalize(net, constraints=plan),
        ),
        "from_hf": (names, lambda plan: ftp.from_hf(net, plan=plan)),
        "lora": (SPECS, lambda plan: plans.lora(net, plan)),
        "exported specs": (SPECS, lambda plan: ftp.shard_exported(program, mesh, plan)),
        "exported styles": (styles, lambda plan: ftp.shard_exported(program, mesh, plan)),
    }


KINDS = kinds()


@pytest.mark.filterwarnings("ignore::ftp.errors.PlanWarning")  # the head stays whole
@pytest.mark.parametrize("kind", slow_after(2, KINDS))
def test_other_plans(kind):
    plan, read = KINDS[kind]
    read(plan)
    tried = 0
    for pattern, wrong in mistaken(plan):
        suggested = re.findall(
            r"'([^']+)'", re.split("nearest (?:is|are)", message_of(read, wrong))[1]
        )[0]
        assert matches(pattern, tuple(suggested.split("."))), (pattern, list(wrong), suggested)
        tried += 1
    assert tried >= 6
