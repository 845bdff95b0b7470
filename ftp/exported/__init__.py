"""Exported programs: from a single-device ``torch.export.ExportedProgram`` to one rank's, with its
collectives in the graph.
"""

from ftp.exported.run import bind, simulate
from ftp.exported.shard import shard_exported

__all__ = ["bind", "shard_exported", "simulate"]
