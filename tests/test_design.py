"""The page on the design: its examples print what it says."""

import re
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


def test_the_places_on_the_page_are_where_it_says():
    section = PAGE.read_text().split("## Find the place")[1].split("\n## ")[0]
    found = re.findall(r"`(ftp/[\w/]+\.py)`((?:,? `\w+`)+)", section)
    places = [(path, name) for path, names in found for name in re.findall(r"\w+", names)]
    missing = [
        f"{path} {name}"
        for path, name in places
        if not re.search(rf"^ *(def |class )?{name}\b", (PAGE.parents[1] / path).read_text(), re.M)
    ]
    assert len(places) > 15 and not missing, missing
