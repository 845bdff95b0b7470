"""ftp's own rules, one file per family, which importing this registers; and what users state theirs
with, which come later and may override them.
"""

from pathlib import Path
from traceback import extract_tb

from ftp.errors import RuleError
from ftp.rules.forms import along_dim, einsum, pointwise, reduction
from ftp.rules.registry import RULES, rule
from ftp.torch_internals.op_types import OpOverload

try:  # By full names, as families and forms share some.
    import ftp.rules.along_dim
    import ftp.rules.attention
    import ftp.rules.conv
    import ftp.rules.factory
    import ftp.rules.flex_attention
    import ftp.rules.ftp_ops
    import ftp.rules.index
    import ftp.rules.linalg
    import ftp.rules.loss
    import ftp.rules.low_precision
    import ftp.rules.matmul
    import ftp.rules.norm
    import ftp.rules.pointwise
    import ftp.rules.reduce
    import ftp.rules.shape
    import ftp.rules.slices  # noqa: F401
except Exception as e:
    folder = Path(__file__).parent
    at = [x for x in extract_tb(e.__traceback__) if Path(x.filename).parent == folder][-1]
    raise RuleError(
        f"ftp's own rules cannot be loaded: {at.filename}:{at.lineno}, `{at.line}`, raised"
        f" {type(e).__name__}: {e}. Install ftp again, and a version of torch that it supports."
    ) from e

__all__ = [
    "OWN_RULES",
    "RULES",
    "along_dim",
    "einsum",
    "is_overridden",
    "pointwise",
    "reduction",
    "rule",
]

OWN_RULES = dict(RULES)


def is_overridden(op: OpOverload) -> bool:
    """Whether a user's rule stands in place of ftp's, or for an op of torch's that has none."""
    is_torchs = op in OWN_RULES or op.namespace in ("aten", "prims")
    return is_torchs and RULES.get(op) is not OWN_RULES.get(op)
