"""Connectionist temporal classification: examples are independent."""

from ftp.ops.static_shape import ctc_loss, ctc_loss_backward
from ftp.rules.local_forms import unless_empty
from ftp.rules.registry import make, rule
from ftp.rules.rule import Call, Rule


@rule(ctc_loss)
def loss(call: Call) -> Rule:
    """Targets in one row, of all examples, are whole, and so are the examples."""
    text = (
        "[t] n [c], n [l], n, n -> n, n [t] [w]"
        if call.operands[1].ndim == 2
        else "[t] [n] [c], [l], [n], [n] -> [n], [n] [t] [w]"
    )
    return make(text, local=unless_empty(call, inputs=False))


@rule(ctc_loss_backward)
def loss_backward(call: Call) -> Rule:
    if call.operands[2].ndim == 2:
        text = "n, [t] n [c], n [l], n, n, n, n [t] [w] -> [t] n [c]"
    else:
        text = "[n], [t] [n] [c], [l], [n], [n], [n], [n] [t] [w] -> [t] [n] [c]"
    return make(text, linear=[(0,)], local=unless_empty(call, inputs=False))
