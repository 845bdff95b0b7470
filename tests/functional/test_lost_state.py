"""State that a model keeps in containers and plain objects would be lost at each step."""

import warnings
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from ftp.errors import StaleCaptureWarning, TraceError
from ftp.functional.attributes import attributes_of
from ftp.functional.functionalize import functionalize

# Modules of these tests have attributes whose types pyright does not see.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false


class Meter:
    def __init__(self):
        self.sum, self.n, self.seen = torch.zeros(()), 0, []


class Slotted:
    __slots__ = ("last",)


class Keeping(nn.Module):
    """A model that keeps what it computes, as ``keeps(model, y)`` says."""

    of_class: ClassVar = []

    def __init__(self, keeps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.log, self.by_name, self.recent = [], {}, deque(maxlen=2)
        self.nested, self.of_list = {"a": ({"b": []},)}, defaultdict(list)
        self.meter, self.slotted, self.counts = Meter(), Slotted(), SimpleNamespace(n=0)
        self.parts = [SimpleNamespace(h=None)]
        self.shared, self.shares = [], nn.Identity()
        self.shares.shared = self.shared
        self.keeps = keeps

    def forward(self, x):
        y = x * self.weight
        return y + self.keeps(self, y.sum())


def _rebound(m, y):
    m.log = [*m.log, y]
    return sum(m.log)


def _item(m, y):
    m.by_name["y"] = y + m.by_name.get("y", 0)
    return m.by_name["y"]


def _object(m, y):
    m.meter.sum = m.meter.sum + y
    return m.meter.sum


def _slot(m, y):
    m.slotted.last = y + getattr(m.slotted, "last", 0)
    return y


def _part(m, y):
    m.parts[0].h = y if m.parts[0].h is None else y + m.parts[0].h
    return y


@pytest.mark.parametrize(
    ("keeps", "where"),
    [
        (lambda m, y: m.log.append(y) or sum(m.log), r"'log\[0\]'"),
        (_rebound, r"'log\[0\]'"),
        (_item, r"\"by_name\['y'\]\""),
        (lambda m, y: m.recent.append(y) or sum(m.recent), r"'recent\[0\]'"),
        (lambda m, y: m.of_list["y"].append(y) or y, r"\"of_list\['y'\]\[0\]\""),
        (lambda m, y: m.nested["a"][0]["b"].append(y) or y, r".*\['b'\]\[0\]\""),
        (lambda m, y: m.meter.seen.append(y) or y, r"'meter.seen\[0\]'"),
        (_slot, "'slotted.last'"),
        (_part, r"'parts\[0\].h'"),
        (lambda m, y: m.shares.shared.append(y) or y, r"'shared\[0\]'"),
        (lambda m, y: m.of_class.append(y) or sum(m.of_class), r"'of_class\[0\]'"),
    ],
)  # fmt: skip
def test_tensors_left_in_containers_and_objects_are_warned_of(keeps, where):
    fn, params = functionalize(Keeping(keeps))
    what = f"Keeping leaves a tensor in attribute {where} while it runs. fn is pure: each call"
    with pytest.warns(StaleCaptureWarning, match=what):
        fn(params, torch.ones(3))
    Keeping.of_class.clear()


def test_a_tensor_of_an_object_that_a_call_reads_and_replaces_is_an_error():
    fn, params = functionalize(Keeping(_object))
    with pytest.raises(TraceError, match=r"Keeping replaces attribute 'meter\.sum' while it runs"):
        fn(params, torch.ones(3))


@pytest.mark.parametrize(
    "read",
    [
        lambda kept, x: kept.detach(),
        lambda kept, x: kept.data,
        lambda kept, x: kept.detach().double().float(),
        lambda kept, x: kept.T.T,
        lambda kept, x: x.new_tensor(kept),
    ],
)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
def test_a_tensor_read_through_an_alias_and_replaced_is_an_error(read):
    """TiCo's loss keeps a covariance: ``self.C = decay * self.C.detach() + ...``."""

    def averaged(m, y):
        m.mean = 0.9 * read(m.mean, y) + y
        return m.mean.sum()

    model = Keeping(averaged)
    model.mean = torch.zeros(2, 2)
    fn, params = functionalize(model)
    with pytest.raises(TraceError, match="Keeping replaces attribute 'mean' while it runs"):
        fn(params, torch.ones(3))


def test_a_tensor_that_a_call_replaces_by_itself_detached():
    def detached(m, y):
        m.mask = m.mask.detach()
        return (m.mask * y).sum()

    model = Keeping(detached)
    model.mask = torch.arange(3.0)
    fn, params = functionalize(model)
    assert torch.equal(fn(params, torch.ones(3)), model(torch.ones(3)))


def _scratch(m, y):
    m.by_name["y"], m.slotted.last = y, 2 * y  # as a hook or a U-net's skips
    return m.by_name["y"] + m.slotted.last


def test_a_tensor_that_an_earlier_call_computed_from_parameters_is_an_error():
    """timm's LeViT keeps the biases of its attention from the first call in eval mode on."""

    def cached(m, y):
        if "w" not in m.by_name:
            m.by_name["w"] = 2 * m.weight
        return m.by_name["w"].sum() * y

    model = Keeping(cached)
    model(torch.ones(3))
    fn, params = functionalize(model)
    where = r"Keeping reads attribute \"by_name\['w'\]\", which an earlier call"
    with pytest.raises(TraceError, match=where):
        fn(params, torch.ones(3))
    model.by_name.clear()
    with torch.no_grad():  # torch would give no gradient through it either
        model(torch.ones(3))
    fn, params = functionalize(model)
    assert torch.equal(fn(params, torch.ones(3)), model(torch.ones(3)))


def test_a_tensor_with_a_graph_is_read_where_no_gradient_flows():
    def averaged(m, y):
        with torch.no_grad():
            teacher = (y * m.average).sum()
        return (m.weight * y).sum() - teacher

    model = Keeping(averaged)
    model.average = 2 * model.weight  # without .detach(), as written at times
    fn, params = functionalize(model)
    y = torch.arange(3.0)
    grads, value = torch.func.grad_and_value(lambda p: fn(p, y).sum())(params)
    (want,) = torch.autograd.grad(model(y).sum(), [model.weight])
    assert torch.equal(value, model(y).sum()) and torch.equal(grads["weight"], want)


@pytest.mark.filterwarnings("ignore::ftp.errors.StaleCaptureWarning")
def test_places_that_each_call_writes_before_it_reads_them():
    fn, params = functionalize(Keeping(_scratch))
    for x in (torch.ones(3), torch.rand(3)):
        torch.testing.assert_close(fn(params, x), Keeping(_scratch)(x))


def test_numbers_counted_in_objects_are_warned_of():
    def count(m, y):
        m.counts.n += 1
        return y * m.counts.n

    fn, params = functionalize(Keeping(count))
    with pytest.warns(StaleCaptureWarning, match="changes attribute 'counts.n' from 0 to 1"):
        fn(params, torch.ones(3))


def test_a_container_that_each_call_begins_anew():
    def begin(m, y):
        m.log = []
        m.log.append(y)
        return m.log[0]

    fn, params = functionalize(Keeping(begin))
    torch.testing.assert_close(fn(params, torch.ones(3)), Keeping(begin)(torch.ones(3)))


def test_an_attribute_that_each_call_assigns_before_it_reads_it_is_none_of_the_last_call():
    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.mem = nn.Parameter(torch.ones(3)), None

        def forward(self, xs):
            self.mem = None
            for x in xs:
                now = x * self.weight
                self.mem = now if self.mem is None else 0.9 * self.mem + now
            return self.mem

    fn, params = functionalize(Leaky())
    xs = torch.rand(4, 3)
    for _ in range(2):
        torch.testing.assert_close(fn(params, xs), Leaky()(xs))


def _emptied(m, y):
    m.log.append(y)
    m.shares.shared.append(y)
    total = sum(m.log) + sum(m.shared)
    m.log.clear()
    m.shared.clear()
    return total


def _constants(m, y):
    if "table" not in m.by_name:
        m.by_name["table"] = torch.arange(3.0).to(y)
    return m.by_name["table"]


@pytest.mark.parametrize("keeps", [_emptied, _constants])
def test_containers_that_carry_no_state_are_left_to_the_model(keeps):
    model = Keeping(keeps)
    fn, params = functionalize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = fn(params, torch.ones(3))
    assert torch.equal(out, model(torch.ones(3)))


def test_long_chains_and_large_vocabularies_of_a_model_are_walked():
    model = Keeping(lambda m, y: y)
    for _ in range(3000):
        model.chain = SimpleNamespace(next=getattr(model, "chain", None))
    model.vocabulary = {f"token {i}": i for i in range(100_000)}
    model.vocabulary["last"] = [0]
    fn, params = functionalize(model)
    assert torch.equal(fn(params, torch.ones(3)), model(torch.ones(3)))
    paths = [held.path for held in attributes_of([("", model)])]
    assert "vocabulary['last'][0]" in paths
    assert len(paths) < 10_000


class Expert(nn.Module):
    def __init__(self, losses):
        super().__init__()
        self.linear, self.losses = nn.Linear(2, 2), losses

    def forward(self, x):
        y = self.linear(x)
        self.losses.append(y.square().sum())
        return y


class Experts(nn.Module):
    """Layers that put their losses in one list, which the model sums."""

    def __init__(self):
        super().__init__()
        self.losses = []
        self.layers = nn.Sequential(Expert(self.losses), Expert(self.losses))

    def forward(self, x):
        y = self.layers(x).sum() + sum(self.losses)
        self.losses.clear()
        return y


def test_modules_that_share_a_list_share_it_in_a_call():
    model, x = Experts().double(), torch.randn(3, 2, dtype=torch.float64)
    fn, params = functionalize(model)
    value, grads = torch.func.grad_and_value(fn)(params, x)[::-1]
    expected = model(x)
    torch.testing.assert_close(value, expected)
    found = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(list(grads.values()), list(found))


def _of_none(model):
    model.cache = None
    return model


def _add_if_missing(model, y):
    y = y + model.cache if hasattr(model, "cache") else y
    model.cache = y
    return y


def _add_if_none(model, y):
    y = y if model.cache is None else y + model.cache
    setattr(model, "cache", y)  # noqa: B010
    return y


def _keep_of_hook(model, args, out):
    model.cache = out


class Plain(nn.Module):
    """A model whose own code assigns no attribute."""

    def __init__(self, does=lambda model, y: y):
        super().__init__()
        self.linear, self.does = nn.Linear(3, 3), does

    def forward(self, x):
        return self.does(self, self.linear(x))


class OfClass(Plain):
    cache = None


def _hooked():
    model = _of_none(Plain(lambda model, y: y if model.cache is None else y + model.cache))
    model.register_forward_hook(_keep_of_hook)
    return model


@pytest.mark.parametrize(
    "made",
    [
        lambda: _of_none(Plain(_add_if_none)),
        lambda: OfClass(_add_if_none),
        lambda: Plain(_add_if_missing),
        _hooked,
    ],
)
def test_an_attribute_that_a_function_outside_of_the_model_fills_is_an_error(made):
    fn, params = functionalize(made())
    with pytest.raises(TraceError, match="fills attribute 'cache' while it runs"):
        fn(params, torch.ones(2, 3))
    assert "__get__" not in vars(OfClass) and OfClass.cache is None
    assert nn.Module.__getattr__.__module__ == nn.Module.__module__


def _write_then_read(model, y):
    model.cache = y * 2
    return y + model.cache


def _fill_table(model, y):
    if getattr(model, "table", None) is None:
        model.table = torch.arange(3.0).cos()
    return y * model.table


def test_attributes_that_functions_fill_with_what_no_call_carries():
    """What is written before it is read, never read, or the same table at each call."""
    logs = _of_none(Plain())
    logs.register_forward_hook(_keep_of_hook)
    x = torch.randn(2, 3)
    for model in (Plain(_write_then_read), OfClass(_write_then_read), Plain(_fill_table), logs):
        fn, params = functionalize(model)
        torch.testing.assert_close([fn(params, x) for _ in range(2)], [model(x) for _ in range(2)])
