"""The steps of torch's optimizers without what sees them all. Read at torch 2.13."""

from typing import Any

from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as _global_hooks


def unprofiled_step(cls: type[Optimizer]) -> Any:
    """``step`` without torch's profiler; None where others see the steps of all optimizers."""
    step: Any = cls.step
    is_seen = bool(_global_hooks or _global_optimizer_post_hooks)
    is_torchs = step.__code__.co_filename == Optimizer.profile_hook_step.__code__.co_filename
    return step.__wrapped__ if is_torchs and not is_seen else None
