"""Passes over a rank's graph, each a graph in and a graph out that computes the same values.

A pass that changes which collectives are issued, or in what order, decides from the plan, which is equal on all ranks.
"""

from ftp.passes.chunk import Chunks as Chunks
from ftp.passes.chunk import chunk_products as chunk_products
from ftp.passes.chunk import chunks as chunks
from ftp.passes.copies import drop_copies as drop_copies
from ftp.passes.memory import reuse_memory as reuse_memory
from ftp.passes.memory import with_values as with_values
from ftp.passes.merge import merge_axes as merge_axes
from ftp.passes.pack import Packs as Packs
from ftp.passes.pack import pack as pack
from ftp.passes.pack import packs as packs
from ftp.passes.pipeline import Joint as Joint
from ftp.passes.pipeline import join_products as join_products
from ftp.passes.pipeline import joints as joints
from ftp.passes.prefetch import prefetch as prefetch
from ftp.passes.schedule import schedule as schedule
from ftp.passes.updates import merge_updates as merge_updates
