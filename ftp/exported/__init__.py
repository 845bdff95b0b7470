"""Exported programs: one rank's ``torch.export.ExportedProgram`` of a single-device one, with
its collectives in the graph.
"""

from ftp.exported.run import bind, simulate
from ftp.exported.shard import shard_exported

__all__ = ["bind", "shard_exported", "simulate"]
