"""Connectionist temporal classification: examples are independent. Targets in one row, of all
examples, are whole, and so are the examples.
"""

from ftp.ops.static_shape import ctc_loss, ctc_loss_backward
from ftp.rules.local_forms import unless_empty
from ftp.rules.registry import rule

rule(
    ctc_loss,
    "[t] n [c], n [l], n, n -> n, n [t] [w]",
    "[t] [n] [c], [l], [n], [n] -> [n], [n] [t] [w]",
    local=unless_empty(inputs=False),
)
rule(
    ctc_loss_backward,
    "n, [t] n [c], n [l], n, n, n, n [t] [w] -> [t] n [c]",
    "[n], [t] [n] [c], [l], [n], [n], [n], [n] [t] [w] -> [t] [n] [c]",
    linear=[(0,)],
    local=unless_empty(inputs=False),
)
