"""The state of autograd, and of autocast, on this thread. Read at torch 2.13."""

from contextlib import AbstractContextManager, nullcontext

from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._C import _current_autograd_node as current_autograd_node
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C._autograd import _get_sequence_nr as get_sequence_nr
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_default_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_default_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_default_hooks
from torch.autograd import forward_ad


def forward_level() -> int:
    """The level of forward-mode autograd that is entered, from 0; -1 outside of any."""
    return forward_ad._current_level


def forward_mode_allowed() -> AbstractContextManager[None]:
    """Within the block code may enter forward-mode autograd, also where an autograd.Function's
    forward has switched it off; not where a level around that is entered.
    """
    return forward_ad._set_fwd_grad_enabled(True) if forward_level() < 0 else nullcontext()
