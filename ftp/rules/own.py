"""ftp's own rules, one file per family, which importing this registers; and what users state theirs
with, which come later and may override them.
"""

# By full names, as families and forms share some.
import ftp.rules.along_dim
import ftp.rules.attention
import ftp.rules.conv
import ftp.rules.factory
import ftp.rules.flex_attention
import ftp.rules.ftp_ops
import ftp.rules.index
import ftp.rules.linalg
import ftp.rules.loss
import ftp.rules.matmul
import ftp.rules.norm
import ftp.rules.pointwise
import ftp.rules.reduce
import ftp.rules.shape
import ftp.rules.slices  # noqa: F401
from ftp.rules.forms import along_dim, einsum, pointwise, reduction
from ftp.rules.registry import RULES, rule

__all__ = ["OWN_RULES", "RULES", "along_dim", "einsum", "pointwise", "reduction", "rule"]

OWN_RULES = dict(RULES)
