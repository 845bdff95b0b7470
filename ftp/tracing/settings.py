"""The settings of torch on which a trace depends."""

from typing import Any

import torch

from ftp.functional.remat import autocast_now


def settings() -> tuple[Any, ...]:
    """The default dtype, and what ``torch.autocast`` casts to: part of a trace's key."""
    return torch.get_default_dtype(), *autocast_now()
