"""torch's default process group, its store and groups by name. Read at torch 2.13."""

from torch._C._distributed_c10d import PythonCallbackWork
from torch._C._distributed_c10d import _resolve_process_group as resolve_process_group
from torch.distributed.distributed_c10d import _get_default_group as get_default_group
from torch.distributed.distributed_c10d import _get_default_store as get_default_store
from torch.distributed.distributed_c10d import _set_pg_timeout as set_pg_timeout
