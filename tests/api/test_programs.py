"""Random programs: simulated on a mesh they compute what plain torch computes, gradients
included.
"""

import torch
from few_or_many import few_or_many
from programs import AXES, Drawn, programs
from torch.utils._pytree import tree_leaves

import ftp

TOLERANCE = 1e-10


def check_values(drawn: Drawn) -> None:
    step = ftp.spmd(
        drawn.function,
        ftp.simulated_mesh(drawn.mesh, AXES[: len(drawn.mesh)]),
        tuple(i.spec for i in drawn.inputs),
        drawn.out_specs,
        data_axes=drawn.data_axes,
        reshard_after_forward=drawn.reshard_after_forward,
        certify=True,
    )
    compare(step(*drawn.values), drawn.function(*drawn.values))


def check_gradients(drawn: Drawn) -> None:
    count = sum(i.is_parameter for i in drawn.inputs)

    def loss(params, *batch):
        return drawn.function(*params, *batch)[0]

    step = ftp.shard(
        loss,
        ftp.simulated_mesh(drawn.mesh, AXES[: len(drawn.mesh)]),
        tuple(i.spec for i in drawn.inputs[:count]),
        batch_specs=tuple(i.spec for i in drawn.inputs[count:]),
        data_axes=drawn.data_axes,
        reshard_after_forward=drawn.reshard_after_forward,
        certify=True,
    )
    params, batch = tuple(drawn.values[:count]), drawn.values[count:]
    grads, value = torch.func.grad_and_value(loss)(params, *batch)
    compare(step(params, *batch), (value, grads))


def compare(found, expected) -> None:
    scale = max(1.0, *(float(e.abs().max()) for e in tree_leaves(expected)))
    torch.testing.assert_close(
        found, expected, rtol=TOLERANCE, atol=TOLERANCE * scale, check_stride=False
    )


@few_or_many(programs(gradients=False, longest=14), few=8, many=3000)
def test_values(drawn: Drawn):
    check_values(drawn)


@few_or_many(programs(gradients=True, longest=14), few=8, many=3000)
def test_gradients(drawn: Drawn):
    check_gradients(drawn)
