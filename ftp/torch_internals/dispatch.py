"""Dispatch keys: which kernels a tensor's ops reach. Read at torch 2.13."""

from torch._C import DispatchKey, DispatchKeySet
from torch._C import _dispatch_has_kernel_for_dispatch_key as dispatch_has_kernel_for_dispatch_key
from torch._C import _dispatch_keys as dispatch_keys
from torch._C import _ExcludeDispatchKeyGuard as ExcludeDispatchKeyGuard
