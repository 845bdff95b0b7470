"""Rules as text: parse and print are inverse, and errors point at the character."""

import pytest
from hypothesis import given
from strategies import notations

from ftp.errors import RuleError
from ftp.rules.bind import bind
from ftp.rules.notation import Notation, parse
from ftp.rules.rule import Rule


@given(notations())
def test_print_and_parse_are_inverse(notation: Notation):
    assert parse(str(notation)) == notation


@pytest.mark.parametrize(
    "text",
    [
        "m k, k n -> m n {k}",
        "... [d] -> ... [d]",
        "(a b) c -> a (b c)",
        "n ([g] c) 1 -> n 1 {c:max n}, ()",
        "-> i",
        "-> ()",
        "a -> () {a}",
    ],
)
def test_written_rules(text: str):
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "why", "at"),
    [
        ("m k k n", "expected '->' at the end", 7),
        ("m ? -> m", "'?' is no part of the notation", 2),
        ("m -> m {k}", "'k' is pending in a result, but no tensor has it", 8),
        ("(m k -> m", "expected a factor, found '->'", 5),
        ("[m -> m", "expected ']', found '->'", 3),
        ("a -> a {a", "expected a factor at the end", 9),
        ("a -> a ) b", "')' after the last result", 7),
        ("... a ... -> a", "'...' stands twice in one tensor", 0),
    ],
)
def test_errors_point_at_what_does_not_fit(text: str, why: str, at: int):
    with pytest.raises(RuleError) as error:
        parse(text)
    assert str(error.value) == f"The rule does not parse: {why}.\n  {text}\n  {' ' * at}^"


def test_a_dim_without_factors_has_size_one():
    rule = Rule(parse("1, a -> a"))
    assert bind(rule, [(1,), (4,)], [(4,)]).sizes == {"a": 4}
    with pytest.raises(RuleError, match="does not fit shapes"):
        bind(rule, [(3,), (4,)], [(4,)])
