"""The lines that explicit mode writes for constraints."""

import pytest

from ftp import P
from ftp.explicit.missing import lines_of
from ftp.explicit.suggest import Wanted
from ftp.ops.constrain import Pin
from ftp.tracing.calls import Output


@pytest.mark.parametrize(
    ("output", "pin", "grad", "expected"),
    [
        (Output("mlp"), Pin(P("tp")), True, 'P("tp", None)'),
        (Output("mlp"), Pin(P(), ("tp",)), False, 'P(None, None), axes="tp", grad=False'),
        (
            Output("mlp", 1),
            Pin(P(), ("dp", "tp")),
            True,
            '(None, P(None, None), ...), axes=("dp", "tp")',
        ),
    ],
)
def test_a_line_for_the_output_of_a_module(output, pin, grad, expected):
    """The axes of a constraint on one of several outputs are its own argument, not an output."""
    (line,) = lines_of([Wanted(output, pin, grad)], {output: 2}, lambda names: ((), 0))
    written = expected if expected == 'P("tp", None)' else f"ftp.Constraint(outputs={expected})"
    assert line.line == f'constraints={{"mlp": {written}}}'
