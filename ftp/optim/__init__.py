"""torch.optim's optimizers as pure functions, with clipping, accumulation, averages and schedules.

>>> import torch
>>> from ftp import optim
>>> opt = optim.from_torch(torch.optim.SGD, lr=0.5)
>>> params = {"w": torch.ones(2)}
>>> state = opt.init(params)
>>> params, state = opt.update({"w": torch.ones(2)}, state, params)
>>> params["w"]
tensor([0.5000, 0.5000])

See ``docs/training.md``.
"""

from ftp.optim import schedules
from ftp.optim.base import Optimizer
from ftp.optim.by_owner import by_owner
from ftp.optim.by_path import by_path
from ftp.optim.gradients import accumulate, clip_by_global_norm, count_nonfinite, global_norm
from ftp.optim.parameters import ema, select
from ftp.optim.torch_optimizer import from_torch

__all__ = [
    "Optimizer",
    "accumulate",
    "by_owner",
    "by_path",
    "clip_by_global_norm",
    "count_nonfinite",
    "ema",
    "from_torch",
    "global_norm",
    "schedules",
    "select",
]
