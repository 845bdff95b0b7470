"""Ops that run along a dim: running sums, orders."""

from ftp.rules.forms import along_dims
from ftp.rules.local_forms import unless_empty
from ftp.rules.overloads import aten

along_dims(aten.cumsum.default, linear=[(0,)])
along_dims(
    aten.cummax.default, aten.cummin.default, aten.cumprod.default, aten.logcumsumexp.default,
    aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable,
    aten.topk.default,
    local=unless_empty(),
)  # fmt: skip
