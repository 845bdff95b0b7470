"""Passes over a rank's graph: each takes a graph and returns one that computes the same values.

A pass that changes which collectives are issued, or in what order, decides from the plan, which is
equal on all ranks.
"""

from ftp.passes.arrived_rows import only_arrived as only_arrived
from ftp.passes.branch_order import mark as mark
from ftp.passes.bucket_collectives import Packs as Packs
from ftp.passes.bucket_collectives import in_order_of as in_order_of
from ftp.passes.bucket_collectives import pack as pack
from ftp.passes.bucket_collectives import packs as packs
from ftp.passes.buffer_reuse import reuse_memory as reuse_memory
from ftp.passes.buffer_reuse import with_values as with_values
from ftp.passes.chunk_matmuls import Chunks as Chunks
from ftp.passes.chunk_matmuls import chunk_matmuls as chunk_matmuls
from ftp.passes.chunk_matmuls import chunks as chunks
from ftp.passes.copy_elimination import drop_copies as drop_copies
from ftp.passes.fuse_matmul_collectives import Joint as Joint
from ftp.passes.fuse_matmul_collectives import fuse_matmuls as fuse_matmuls
from ftp.passes.fuse_matmul_collectives import joints as joints
from ftp.passes.fuse_optimizer_updates import merge_updates as merge_updates
from ftp.passes.merge_axes import merge_axes as merge_axes
from ftp.passes.narrow_reductions import gradient_reductions as gradient_reductions
from ftp.passes.narrow_reductions import narrow_reductions as narrow_reductions
from ftp.passes.outline_branches import outline_branches as outline_branches
from ftp.passes.prefetch_parameters import prefetch as prefetch
from ftp.passes.schedule import schedule as schedule
from ftp.passes.span_hosts import Span as Span
from ftp.passes.span_hosts import span_hosts as span_hosts
from ftp.passes.span_hosts import span_packs as span_packs
from ftp.passes.span_hosts import spans as spans
