"""Programs that write to memory as hand-written code does: elements, ``out=``, ``.data``, views in
place; and constants that they read.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ftp
from ftp import P
from ftp.errors import CertificateError, TraceError
from tests.museum.proven import MESH, randn

X, W, BIAS = randn(4, 6), randn(6, 3), randn(3)
ROWS = (P(None, "tp"), P("tp"))


def prove(reference: Any, program: Any, specs: Any = ROWS, out: Any = P()):
    return ftp.equivalent(reference, program, MESH, specs, out, X, W)


def summed(x, w):
    y = x @ w
    dist.all_reduce(y)
    return y


def test_constants_and_modules_of_the_closure():
    layer = torch.nn.Linear(3, 2, dtype=torch.float64)

    def program(x, w):
        return layer(summed(x, w) + BIAS * torch.tensor(2.0))

    prove(lambda x, w: layer(x @ w + 2 * BIAS), program)
    with pytest.raises(CertificateError):
        prove(lambda x, w: layer(x @ w - 2 * BIAS), program)


def test_elements_that_are_written():
    def first_row(x, w):
        y = x @ w
        return torch.cat([torch.full_like(y[:1], 2.0), y[1:]])

    def program(x, w):
        y = summed(x, w)
        y[0] = 2.0
        return y

    prove(first_row, program)
    with pytest.raises(CertificateError):
        prove(torch.matmul, program)


def test_results_that_are_written_into_a_buffer():
    def program(x, w):
        buffer = torch.empty(4, 3, dtype=x.dtype)
        dist.all_reduce(torch.mm(x, w, out=buffer))
        return torch.exp(buffer, out=buffer)

    prove(lambda x, w: (x @ w).exp(), program)

    def largest(x, w):
        values, places = torch.empty(4, dtype=x.dtype), torch.empty(4, dtype=torch.int64)
        torch.max(summed(x, w), 1, out=(values, places))
        return values

    prove(lambda x, w: (x @ w).amax(1), largest)
    with pytest.raises(TraceError, match=r"out= is of shape \(0,\), the result of .* \(4, 3\)"):
        prove(torch.matmul, lambda x, w: torch.mm(x, w, out=torch.empty(0, dtype=x.dtype)))


def test_a_tensor_that_becomes_a_view_of_itself():
    prove(lambda x, w: (x @ w).t()[:, None], lambda x, w: summed(x, w).t_().unsqueeze_(1))


def test_data_that_is_replaced():
    """As FSDP by hand does with a parameter: the tensors share memory from then on."""

    def program(x, w):
        layer = torch.nn.Linear(6, 3, bias=False, dtype=x.dtype)
        layer.weight.data = w.t()
        return layer(x)

    prove(torch.matmul, program, (P("tp"), P()), P("tp"))

    def shared(x, w):
        y, other = x @ w, torch.empty(0, dtype=x.dtype)
        other.data = y
        dist.all_reduce(other)
        return y

    prove(torch.matmul, shared)
    with pytest.raises(CertificateError):
        prove(lambda x, w: 2 * (x @ w), shared)


def test_lists_of_tensors():
    """Data parallelism with ops of lists: an optimizer's, and the mean of gradients."""

    def trained(w, x):
        w = torch.nn.Parameter(w.clone())
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9, foreach=True)
        (x @ w).square().mean().backward()
        return w, optimizer

    def program(w, x, is_divided=True):
        w, optimizer = trained(w, x)
        grads = [p.grad for p in (w,)]
        dist.all_reduce(grads[0])
        if is_divided:
            torch._foreach_div_(grads, 2)
        torch.nn.utils.clip_grad_norm_([w], 100.0, foreach=True)
        optimizer.step()
        return w.detach()

    def clipped(w, x):
        w, optimizer = trained(w, x)
        torch.nn.utils.clip_grad_norm_([w], 100.0)
        optimizer.step()
        return w.detach()

    given = (MESH, (P(), P("tp")), P(), randn(3, 2), randn(4, 3))
    ftp.equivalent(clipped, program, *given)
    for wrong in (clipped, lambda w, x: program(w, x, is_divided=False)):
        with pytest.raises(CertificateError):
            ftp.equivalent(clipped, wrong, *given)


def replaced(x):
    x.data = x * 2


WRITES: dict[str, Any] = {
    "out=": lambda x: torch.mul(x, 2, out=x),
    "element": lambda x: x.__setitem__(0, 2.0),
    "view": lambda x: x[0].zero_(),
    ".data": lambda x: x.data.mul_(2),
    ".detach()": lambda x: x.detach().mul_(2),
    "itself": lambda x: x.t_(),
    "replaced": replaced,
}


@pytest.mark.parametrize("name", WRITES)
def test_an_input_that_is_written_in_any_way_is_an_error(name: str):
    def program(x, w):
        WRITES[name](x)
        return summed(x, w)

    with pytest.raises(TraceError, match=r"writes to its input (x|args.0.) "):
        prove(torch.matmul, program)


def test_ranks_that_send_different_dtypes():
    def program(x, w):
        y = x @ w
        dist.all_reduce(y.float() if dist.get_rank() else y)  # here
        return y

    with pytest.raises(CertificateError, match=r"of torch.float64 on one rank, torch.float32") as e:
        prove(torch.matmul, program)
    assert "# here" in (e.value.line or "")
