"""Factor notation: ``"m k, k n -> m n {k}"`` to factors and back; parse and print are inverse.

Operands stand before the arrow, results after it, with spaces between dims::

    letters     factors, one per dim
    ...         leading batch dims, the same in every tensor
    (i j)       one dim, i major
    1           a dim of size one
    [d]         the op acts along d: it is whole on every rank
    {k}         after a result: when k is split, this result is a pending sum over it
    {k:max}     the same for a pending maximum
"""

import re

from ftp.dataclass import dataclass
from ftp.errors import RuleError

BATCH = "..."
PENDING = ("sum", "max", "min")
Dim = tuple[str, ...]
Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class Notation:
    """Factors of every dim of every operand and result; ``whole`` factors; per result its pending
    ``(factor, op)`` pairs.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[str] = frozenset()
    pending: tuple[tuple[tuple[str, str], ...], ...] = ()

    def __str__(self) -> str:
        operands = ", ".join(self._tensor(dims) for dims in self.operands)
        results = ", ".join(
            " ".join(filter(None, [self._tensor(dims), self._pending(pending)]))
            for dims, pending in zip(self.results, self.pending, strict=True)
        )
        return f"{operands} -> {results}".strip()

    def _tensor(self, dims: Dims) -> str:
        return " ".join(self._dim(dim) for dim in dims) or "()"

    def _dim(self, dim: Dim) -> str:
        if len(dim) == 1:
            return self._factor(dim[0])
        return f"({' '.join(map(self._factor, dim))})" if dim else "1"

    def _factor(self, factor: str) -> str:
        return f"[{factor}]" if factor in self.whole else factor

    def _pending(self, pending: tuple[tuple[str, str], ...]) -> str:
        return (
            "{" + " ".join(f if op == "sum" else f"{f}:{op}" for f, op in pending) + "}"
            if pending
            else ""
        )


_TOKEN = re.compile(r"\s*(->|\.\.\.|[A-Za-z_~][A-Za-z0-9_~]*|1|[()\[\]{},:])")


def parse(text: str) -> Notation:
    """Read a rule's text.

    >>> print(parse("v  d,... -> ... d{v}"))
    v d, ... -> ... d {v}

    Raises:
        RuleError: with the text and a caret under the first character that does not fit.
    """
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str):
        self.text, self.tokens, self.whole = text, [], set()
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                at += len(text[at:]) - len(text[at:].lstrip())
                self.fail(at, f"{text[at]!r} is no part of the notation")
            self.tokens.append((match.group(1), match.start(1)))
            at = match.end()
        self.tokens.append(("", len(text)))
        self.next = 0

    def fail(self, at: int, why: str):
        raise RuleError(f"The rule does not parse: {why}.\n  {self.text}\n  {' ' * at}^")

    @property
    def token(self) -> str:
        return self.tokens[self.next][0]

    def take(self, expected: str | None = None) -> str:
        token, at = self.tokens[self.next]
        if expected is not None and token != expected:
            self.fail(
                at,
                f"expected {expected!r}, found {token!r}"
                if token
                else f"expected {expected!r} at the end",
            )
        self.next += 1
        return token

    def parse(self) -> Notation:
        operands = [] if self.token == "->" else self.tensors()
        self.take("->")
        results, pending = [], []
        while True:
            results.append(self.tensor())
            pending.append(self.reductions())
            if self.token != ",":
                break
            self.take()
        if self.token:
            self.fail(self.tokens[self.next][1], f"{self.token!r} after the last result")
        notation = Notation(tuple(operands), tuple(results), frozenset(self.whole), tuple(pending))
        self.check(notation)
        return notation

    def tensors(self) -> list[Dims]:
        tensors = [self.tensor()]
        while self.token == ",":
            self.take()
            tensors.append(self.tensor())
        return tensors

    def tensor(self) -> Dims:
        dims: list[Dim] = []
        while self.token not in ("", ",", "->", "{", "}", ")", "]", ":"):
            if self.token == "(":
                self.take()
                factors: list[str] = []
                while self.token != ")":
                    factors.append(self.factor())
                self.take(")")
                if factors or self.token not in ("", ",", "->", "{") or dims:
                    dims.append(tuple(factors))
            elif self.token == "1":
                self.take()
                dims.append(())
            else:
                dims.append((self.factor(),))
        return tuple(dims)

    def factor(self) -> str:
        token, at = self.tokens[self.next]
        if token == "[":
            self.take()
            factor = self.factor()
            self.take("]")
            self.whole.add(factor)
            return factor
        if token != BATCH and not re.fullmatch(r"[A-Za-z_~]\w*~?\w*|~\w+", token):
            self.fail(
                at,
                f"expected a factor, found {token!r}" if token else "expected a factor at the end",
            )
        return self.take()

    def reductions(self) -> tuple[tuple[str, str], ...]:
        pending = []
        while self.token == "{":
            self.take()
            while self.token != "}":
                factor, op = self.factor(), "sum"
                if self.token == ":":
                    self.take()
                    op = self.take()
                    if op not in PENDING:
                        self.fail(
                            self.tokens[self.next - 1][1],
                            f"ranks' results are reduced by {', '.join(PENDING)}",
                        )
                pending.append((factor, op))
            self.take("}")
        return tuple(pending)

    def check(self, notation: Notation) -> None:
        known = {f for dims in (*notation.operands, *notation.results) for dim in dims for f in dim}
        for pending in notation.pending:
            for factor, _ in pending:
                if factor not in known:
                    self.fail(
                        self.text.rfind(factor),
                        f"{factor!r} is pending in a result, but no tensor has it",
                    )
        for dims in (*notation.operands, *notation.results):
            if sum(BATCH in dim for dim in dims) > 1:
                self.fail(self.text.find(BATCH), "'...' stands twice in one tensor")
