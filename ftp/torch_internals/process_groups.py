"""torch's default process group, its store and groups by name. Read at torch 2.13 and 2.14."""

from functools import cache
from importlib import import_module

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    DebugLevel,
    PythonCallbackWork,
    get_debug_level,
)
from torch._C._distributed_c10d import _resolve_process_group as resolve_process_group
from torch.distributed.distributed_c10d import _get_default_group as get_default_group
from torch.distributed.distributed_c10d import _get_default_store as get_default_store

# Public from torch 2.14 on, where the private name warns.
set_pg_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout


@cache
def load_python_kernels() -> None:
    """Load what torch has of collectives in Python: their results on fake tensors, and autograd.
    It takes a tenth of the time of importing ftp, and a step whose plan is found needs neither.
    """
    import_module("torch.distributed._functional_collectives")
