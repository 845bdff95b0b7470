"""The options of ``shard`` and ``spmd``, without their specs."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from ftp.dataclass import dataclass
from ftp.planning.machine import GivenHardware

PROGRAMS = 64  # programs that a step keeps


@dataclass(frozen=True)
class Options:
    """The options of a step; ``ftp.shard`` describes them, ``checked_options`` checks them.

    >>> Options(bucket=False).chunks
    1
    """

    data_axes: Sequence[str] | None = None
    reshard_after_forward: bool = True
    donate: Sequence[int] = ()
    compile: bool = False
    strict: bool = False
    explicit: bool = False
    certify: bool = False
    bucket: bool = True
    check_inputs: bool = False
    prefetch: int | None = None
    chunks: int = 1
    cuda_graph: bool = False
    async_tp: bool = False
    programs: int = PROGRAMS
    hardware: GivenHardware = None
    reduce_dtype: torch.dtype | None = None

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> "Options":
        """The options among a function's arguments, by name.

        >>> Options.among({"loss_fn": print, "bucket": False}).bucket
        False
        """
        names = [f.name for f in fields(cls) if f.name in arguments]
        return cls(**{name: arguments[name] for name in names})


DEFAULT = Options()
