"""Connectionist temporal classification: examples are independent."""

from ftp.fixed_shapes import ctc_loss, ctc_loss_backward
from ftp.registry import Call, Rule, make, rule
from ftp.rules.local import unless_empty


@rule(ctc_loss)
def loss(call: Call) -> Rule:
    """Targets in one row, of all examples, are whole, and so are the examples."""
    text = "[t] n [c], n [l], n, n -> n, n [t] [w]" if call.operands[1].ndim == 2 else "[t] [n] [c], [l], [n], [n] -> [n], [n] [t] [w]"
    return make(text, local=unless_empty(call, inputs=False))


@rule(ctc_loss_backward)
def loss_backward(call: Call) -> Rule:
    if call.operands[2].ndim == 2:
        text = "n, [t] n [c], n [l], n, n, n, n [t] [w] -> [t] n [c]"
    else:
        text = "[n], [t] [n] [c], [l], [n], [n], [n], [n] [t] [w] -> [t] [n] [c]"
    return make(text, linear=[(0,)], local=unless_empty(call, inputs=False))
