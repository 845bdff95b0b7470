"""The examples of a page of docs, run as doctests."""

import doctest
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def run_examples(name: str, least: int = 1) -> None:
    """Run the examples of ``docs/NAME``, of which there are at least ``least``."""
    text = (DOCS / name).read_text().replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {}, name, str(DOCS / name), 0)
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    runner.run(test, out=printed.append)
    assert runner.summarize(verbose=False) == (0, len(test.examples)), "".join(printed)
    assert len(test.examples) >= least
