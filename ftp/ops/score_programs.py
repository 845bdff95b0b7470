"""``score_mod`` and ``mask_mod`` of torch's flex_attention as graphs, with the tensors that they
capture.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from ftp.ops.score_functions import intern
from ftp.torch_internals import pytree
from ftp.torch_internals.fake_tensors import FakeTensorMode
from ftp.torch_internals.functorch import temporarily_clear_interpreter_stack
from ftp.torch_internals.modes import disable_current_modes

aten = torch.ops.aten


def as_program(
    function: Callable[..., Tensor],
    is_mask: bool,
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[str, list[Tensor]]:
    """The key of a ``score_mod`` or ``mask_mod``, and the tensors that it captures.

    Args:
        sizes: of batch, heads, queries and keys.
        dtype: of scores.
    """

    def place(*dtypes: torch.dtype) -> list[Tensor]:
        return [torch.empty((), dtype=d, device=device) for d in dtypes]

    # Hide the surrounding trace: this one records ops on single scores.
    with disable_current_modes(), temporarily_clear_interpreter_stack():
        at = (torch.int64,) * 4 if is_mask else (dtype, *(torch.int64,) * 4)
        with FakeTensorMode() as mode, torch.no_grad():
            seen = _Captures(mode)
            with seen:
                function(*place(*at))
            captured = list(seen.stand_ins)
            stand_ins = [seen.stand_ins[x][1] for x in captured]
            places = place(*at, *(torch.int64,) * 4)
        originals = [seen.stand_ins[x][0] for x in captured]

        def run(*given: Tensor) -> tuple[Tensor]:
            pairs = zip(originals, given[len(places) :], strict=True)
            known = dict(zip(captured, pairs, strict=True))
            with _Captures(mode, known):
                return (function(*given[: len(at)]),)

        with mode, torch.no_grad():
            gm = make_fx(run, tracing_mode="real")(*places, *stand_ins)
        originals += _constants(gm)
    return intern(gm, originals, is_mask, sizes)


def _constants(gm: torch.fx.GraphModule) -> list[Tensor]:
    """Turn a graph's constant tensors into further inputs, and return them."""
    found = []
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    for node in list(gm.graph.nodes):
        if node.op == "get_attr":
            found.append(getattr(gm, node.target))
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(f"constant_{len(found)}")
            last.meta["val"] = torch.empty_like(found[-1], device="meta")
            node.replace_all_uses_with(last)
            gm.graph.erase_node(node)
    return found


class _Captures(TorchFunctionMode):
    """Puts stand-ins in the place of tensors that a function captured.

    Attributes:
        stand_ins: by ``id`` of a captured tensor, the tensor and its stand-in.
    """

    def __init__(self, mode: FakeTensorMode, known: dict[int, tuple[Tensor, Tensor]] | None = None):
        super().__init__()
        self.mode, self.stand_ins, self.own = mode, dict(known or {}), dict[int, Any]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        leaves = [self._stand_in(x) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        made = _looked_up(*args) if func is Tensor.__getitem__ else None
        made = func(*args, **kwargs) if made is None else made
        for x in pytree.tree_leaves(made):
            if isinstance(x, Tensor):
                self.own[id(x)] = x
        return made

    def _stand_in(self, x: Tensor) -> Tensor:
        if id(x) in self.own or getattr(x, "fake_mode", None) is self.mode:
            return x
        if id(x) not in self.stand_ins:
            made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            self.stand_ins[id(x)] = x, made
        return self.stand_ins[id(x)][1]


def _looked_up(x: Tensor, index: Any) -> Tensor | None:
    """``x[index]`` for numbers; None where the index has a slice or a mask."""
    index = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(i, Tensor) for i in index):
        return None
    given = []
    for i in index:
        if type(i) is int:
            given.append(torch.tensor(i, device=x.device))
        elif isinstance(i, Tensor) and i.dtype not in (torch.bool, torch.uint8):
            given.append(i)
        else:
            return None
    return aten.index.Tensor(x, given)
