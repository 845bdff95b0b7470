"""Selected rows as results of a program: all rows, the selected ones first, and their number."""

from typing import Any

import optree

from ftp.errors import TraceError
from ftp.ops.microbatch_means import means_of_trace
from ftp.sharding.counted_rows import CountedRows
from ftp.sharding.pytree import NAMESPACE, flatten
from ftp.tracing.selected import Selected, order_of
from ftp.tracing.traced_number import TracedNumber


def counted(result: Any) -> Any:
    """A function's result with each selection as all rows, the selected ones first, and their
    number. A pipeline keeps the selection, and refuses it: each microbatch has its own number.
    """
    result = optree.tree_map(
        lambda x: x.value if isinstance(x, TracedNumber) else x, result, namespace=NAMESPACE
    )
    leaves, _ = flatten(result)
    if means_of_trace() is not None or not any(isinstance(x, Selected) for x in leaves):
        return result
    return optree.tree_map(
        lambda x: _counted(x) if isinstance(x, Selected) else x, result, namespace=NAMESPACE
    )


def _counted(x: Selected) -> CountedRows:
    if x.at:
        raise TraceError(x.refused_as("a result whose first dim is not that of the rows"))
    return CountedRows(x.rows.index_select(0, order_of(x.group)), x.group.valid.sum())
