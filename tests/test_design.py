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


def test_the_tree_on_the_page_names_every_package_and_file():
    root = PAGE.parents[1] / "ftp"
    text = PAGE.read_text()
    packages = [f"ftp/{p.parent.name}/" for p in root.glob("*/__init__.py")]
    files = [f"ftp/{p.name}" for p in root.glob("*.py") if p.name != "__init__.py"]
    assert len(files) > 5 and not [name for name in packages + files if name not in text]
