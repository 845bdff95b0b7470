"""Random programs: simulated on a mesh they compute what plain torch computes, gradients
included.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from programs import AXES, Drawn, programs
from torch.utils._pytree import tree_leaves

import ftp

QUICK = settings(
    max_examples=160,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
LARGE = settings(QUICK, max_examples=3000, derandomize=False)
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


@QUICK
@given(programs(gradients=False))
def test_values(drawn: Drawn):
    check_values(drawn)


@QUICK
@given(programs(gradients=True))
def test_gradients(drawn: Drawn):
    check_gradients(drawn)


@pytest.mark.slow
@LARGE
@given(programs(gradients=False, longest=14))
def test_values_of_many(drawn: Drawn):
    check_values(drawn)


@pytest.mark.slow
@LARGE
@given(programs(gradients=True, longest=14))
def test_gradients_of_many(drawn: Drawn):
    check_gradients(drawn)
