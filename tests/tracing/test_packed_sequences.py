"""Packed sequences through recurrent layers: losses and gradients of plain torch, on any mesh."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from few_or_many import slow_unless
from public_programs import Program, of_model, reference
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

import ftp
from ftp import P
from ftp.errors import InputError, TraceError

IDS = torch.tensor([[1, 4, 2, 0, 0], [3, 3, 1, 5, 2], [6, 0, 0, 0, 0], [2, 5, 4, 1, 0]])
CLASSES = torch.tensor([[0, 2, 1, 0, 0], [1, 1, 0, 2, 2], [2, 0, 0, 0, 0], [0, 1, 2, 1, 0]])
LENGTHS = torch.tensor([3, 5, 1, 4])


class Tagger(nn.Module):
    def __init__(self, kind: str, reads: str, **options: Any):
        super().__init__()
        self.reads, self.embed = reads, nn.Embedding(7, 4)
        self.rnn = getattr(nn, kind)(4, 5, **options)
        width = options.get("proj_size") or 5
        self.out = nn.Linear(width * (1 + self.rnn.bidirectional), 3)

    def forward(self, ids: Tensor, lengths: Tensor, classes: Tensor) -> Tensor:
        x, first = self.embed(ids), self.rnn.batch_first
        packed = pack_padded_sequence(
            x if first else x.transpose(0, 1), lengths, first, enforce_sorted=False
        )
        made, last = self.rnn(packed)
        if self.reads == "rows":
            due = pack_padded_sequence(classes, lengths, True, enforce_sorted=False)
            return F.cross_entropy(self.out(made.data), due.data)
        if self.reads == "states":
            states = last if isinstance(last, tuple) else (last,)
            return sum((s.sin() * (i + 1)).square().mean() for i, s in enumerate(states))
        whole, found = pad_packed_sequence(made, first, padding_value=0.5, total_length=7)
        whole = whole if first else whole.transpose(0, 1)
        return self.out(whole).square().mean() + (whole.sum(1) / found[:, None]).sin().sum()


MODELS = {
    "LSTM, states": lambda: Tagger("LSTM", "states", batch_first=True),
    "LSTM, two layers both ways": lambda: Tagger(
        "LSTM", "padded", num_layers=2, bidirectional=True, batch_first=True
    ),
    "LSTM, projected": lambda: Tagger("LSTM", "padded", proj_size=2, bidirectional=True),
    "LSTM, rows without biases": lambda: Tagger("LSTM", "rows", bias=False),
    "GRU, rows": lambda: Tagger("GRU", "rows", batch_first=True),
    "GRU, states both ways": lambda: Tagger("GRU", "states", bidirectional=True, num_layers=2),
    "RNN": lambda: Tagger("RNN", "padded", batch_first=True),
    "RNN with relu": lambda: Tagger("RNN", "rows", nonlinearity="relu", bidirectional=True),
}


MESHES = {"tp3": ((3,), ("tp",)), "dp2×tp2": ((2, 2), ("dp", "tp"))}


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    ("name", "mesh_name"),
    slow_unless(
        lambda name, mesh: (
            list(MODELS).index(name) % 2 == list(MESHES).index(mesh)
            and name not in ("LSTM, states", "GRU, rows")  # others hold what they do
        ),
        itertools.product(MODELS, MESHES),
    ),
)
def test_losses_and_gradients(name: str, mesh_name: str):
    mesh = MESHES[mesh_name]
    program = of_model(MODELS[name](), lambda call, *batch: call(*batch), IDS, LENGTHS, CLASSES)
    specs = {path: P("tp") if p.ndim > 1 else P() for path, p in program.params.items()}
    batch_specs = P("dp") if "dp" in mesh[1] else P()
    step = ftp.shard(
        program.loss, ftp.simulated_mesh(*mesh), specs, batch_specs=batch_specs, certify=True
    )
    loss, grads = step(program.params, *program.batch)
    expected, gradients = reference(program)
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(grads, gradients, rtol=1e-9, atol=1e-12)


def of_lengths(lengths: Any, pad: Any = pad_packed_sequence, **options: Any) -> Any:
    """A step of a GRU over packed sequences, its arguments, and the function."""
    fn, params = ftp.functionalize(nn.GRU(4, 5, batch_first=True).double())

    def loss(params: Any, x: Tensor, lengths: Tensor) -> Tensor:
        made, _ = fn(params, pack_padded_sequence(x, lengths, batch_first=True))
        return pad(made, batch_first=True)[0].square().mean()

    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P(), **options)
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(3, 5, 4)
    return step, ({k: p.detach() for k, p in params.items()}, x, torch.tensor(lengths)), loss


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    ("lengths", "claim"),
    [
        ([4, 3, 1], "the longest sequence has all 5 steps"),
        ([5, 3, 0], r"lengths in \[1, 5\]"),
        ([6, 3, 1], r"lengths in \[1, 5\]"),
        ([3, 5, 1], "sorted by length"),
    ],
)
def test_what_is_assumed_of_lengths(lengths: list[int], claim: str):
    step, args, loss = of_lengths([5, 3, 1], check_inputs=True)
    with pytest.warns(UserWarning, match="Give pad_packed_sequence total_length=5"):
        value, _ = step(*args)
    with pytest.warns(UserWarning, match="Give pad_packed_sequence total_length=5"):
        assumed = step.lower(*args).assumptions
    assert len(assumed) == 3
    torch.testing.assert_close(value, loss(*args), rtol=1e-12, atol=1e-12)
    with pytest.raises(InputError, match=claim):
        step(*args[:2], torch.tensor(lengths))


def test_padded_to_a_total_length_by_any_lengths():
    def pad(x: Any, **options: Any) -> Any:
        return pad_packed_sequence(x, **options, total_length=6)

    step, args, loss = of_lengths([3, 2, 2], pad, check_inputs=True)
    torch.testing.assert_close(step(*args)[0], loss(*args), rtol=1e-12, atol=1e-12)
    assert len(step.lower(*args).assumptions) == 2


def lengths_of(loss: Any, *args: Any) -> ftp.Step:
    return ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P(), strict=True)(*args)


def test_lengths_that_are_numbers_are_checked_at_once():
    x = torch.ones(3, 5, 4, dtype=torch.float64)

    def loss(w: Tensor, x: Tensor, lengths: list[int]) -> Tensor:
        packed = pack_padded_sequence(x * w, lengths, batch_first=True)
        return pad_packed_sequence(packed, batch_first=True)[0].mean()

    value, _ = lengths_of(lambda w, x: loss(w, x, [5, 2, 1]), x[0, 0], x)
    torch.testing.assert_close(value, loss(x[0, 0], x, [5, 2, 1]))
    with pytest.raises(TraceError, match="has all 5 steps: this does not hold"):
        lengths_of(lambda w, x: loss(w, x, [4, 2, 1]), x[0, 0], x)
    with pytest.raises(TraceError, match=r"lengths of shape \(2,\) for 3 sequences"):
        lengths_of(lambda w, x: loss(w, x, [5, 2]), x[0, 0], x)


def test_the_number_of_steps_is_assumed():
    def loss(w: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x * w, lengths, batch_first=True)
        return packed.data.sum() / packed.batch_sizes.size(0)

    x = torch.ones(3, 5, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="assumes that the longest sequence has all 5 steps"):
        lengths_of(loss, x[0, 0], x, torch.tensor([5, 2, 1]))


def test_rows_of_another_mask_are_no_packed_sequence():
    def loss(w: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
        sizes = pack_padded_sequence(x, lengths, batch_first=True).batch_sizes
        rows = (x * w)[torch.arange(5) < lengths[:, None]]
        padded, _ = pad_packed_sequence(PackedSequence(rows, sizes), True, total_length=5)
        return padded.square().mean()

    x = torch.ones(3, 5, 4, dtype=torch.float64)
    with pytest.raises(TraceError, match="a PackedSequence of rows that another mask selects"):
        lengths_of(loss, x[0, 0], x, torch.tensor([5, 2, 1]))


def test_rows_of_padding_add_no_infinite_gradient():
    """The backward direction has the first state, here zeros, at steps behind a sequence."""
    fn, params = ftp.functionalize(nn.RNN(4, 5, batch_first=True, bidirectional=True).double())

    def loss(given: Any, x: Tensor, lengths: Tensor) -> Tensor:
        params = {k: p for k, p in given.items() if k != "first"}
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        made, _ = fn(params, packed, given["first"])
        return made.data[:, 5:].square().sum(-1).sqrt().sum()

    x = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(3, 5, 4)
    given = {k: p.detach() for k, p in params.items()}
    given["first"] = torch.zeros(2, 3, 5, dtype=x.dtype)
    program = Program(loss, given, (x, torch.tensor([5, 3, 1])))
    expected, gradients = reference(program)
    value, grads = lengths_of(loss, given, *program.batch)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, gradients, rtol=1e-10, atol=1e-12)


def test_a_list_of_sequences():
    rows = [torch.linspace(0, n, n * 2, dtype=torch.float64).reshape(n, 2) for n in (4, 2, 1)]

    def loss(w: Tensor, *rows: Tensor) -> Tensor:
        return (pack_sequence([*rows]).data @ w).tanh().mean()

    w = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)
    expected, due = torch.func.grad_and_value(loss)(w, *rows)[::-1]
    value, grad = ftp.shard(loss, ftp.simulated_mesh((3,), ("tp",)), P(None, "tp"))(w, *rows)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, due, rtol=1e-12, atol=1e-12)


def test_batch_sizes_are_values():
    def loss(w: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x @ w, lengths, batch_first=True)
        return sum(packed.data[: int(n)].sum() for n in packed.batch_sizes)

    x = torch.ones(3, 5, 4, dtype=torch.float64)
    with pytest.raises(TraceError, match="batch_sizes of a packed sequence depend on values"):
        ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P())(x[0, :4], x, LENGTHS[:3])
