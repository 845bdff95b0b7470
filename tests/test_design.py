"""The page on the design: its examples print what it says."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "design.md"


def test_the_page():
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    text = PAGE.read_text().replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {}, "design", str(PAGE), 0)
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=flags)
    runner.run(test, out=printed.append)
    assert runner.summarize(verbose=False) == (0, len(test.examples)), "".join(printed)
    assert len(test.examples) > 30


def test_the_tree_on_the_page_names_every_package():
    root = PAGE.parents[1] / "ftp"
    text = PAGE.read_text()
    missing = [
        p.name
        for p in root.iterdir()
        if (p / "__init__.py").exists() and f"ftp/{p.name}/" not in text
    ]
    assert not missing
