"""The page on the design: its examples print what it says."""

from pathlib import Path

from pages import run_examples

PAGE = Path(__file__).parents[1] / "docs" / "design.md"


def test_the_page():
    run_examples("design.md", least=31)


def test_the_tree_on_the_page_names_every_package_and_file():
    root = PAGE.parents[1] / "ftp"
    text = PAGE.read_text()
    packages = [f"ftp/{p.parent.name}/" for p in root.glob("*/__init__.py")]
    files = [f"ftp/{p.name}" for p in root.glob("*.py") if p.name != "__init__.py"]
    assert len(files) > 5 and not [name for name in packages + files if name not in text]
