"""Selected rows as results of a program: `CountedRows`, which hold all rows, the selected rows
first, and the number of selected rows.
"""

from typing import Any

import optree

from ftp.ops.microbatch_means import means_of_trace
from ftp.sharding.counted_rows import CountedRows
from ftp.sharding.pytree import NAMESPACE, flatten
from ftp.tracing.data_dependent.traced_number import TracedNumber
from ftp.tracing.selected_rows.group import selected_indices
from ftp.tracing.selected_rows.refused import value_error
from ftp.tracing.selected_rows.selected import Selected


def counted(result: Any) -> Any:
    """Replace each selection in a function's result by `CountedRows`. A pipeline keeps the
    selection and refuses it later: each microbatch selects a number of its own.
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
    if x.row_dim:
        raise value_error(x.refused_as("a result whose first dim is not that of the rows"))
    return CountedRows(x.rows.index_select(0, selected_indices(x.group)), x.group.valid.sum())
