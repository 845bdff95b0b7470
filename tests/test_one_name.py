"""One name, one type: no two classes or type aliases of ftp share a name."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ftp"

# Aliases that several files give to one type, each where it is read, as no package lies below all
# of them.
ALIKE = {"AxisSet", "Offset", "Patterns", "Run", "Shape", "Values"}


def types_of(source: str) -> list[tuple[str, str]]:
    """Classes, and aliases such as ``Shape = tuple[int, ...]``: name without underscores, and
    definition.
    """
    tree = ast.parse(source)
    found = [
        (node.name.lstrip("_"), f"class at line {node.lineno}")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    for node in tree.body:
        if not isinstance(node, ast.Assign) or len(node.targets) > 1:
            continue
        target = node.targets[0]
        name = target.id.lstrip("_") if isinstance(target, ast.Name) else ""
        is_union = isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr)
        is_alias = is_union or isinstance(node.value, ast.Subscript)
        if is_alias and name[:1].isupper() and not name.isupper():
            found.append((name, ast.unparse(node.value)))
    return found


@cache
def shared_names() -> dict[str, list[str]]:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, definition in types_of(path.read_text()):
            places[name].append(f"{path.relative_to(PACKAGE)}: {definition}")
    return {name: found for name, found in places.items() if len(found) > 1}


def test_types_are_found():
    source = "class _A: pass\nBb = tuple[int, ...]\nN = 4\nC = 2 * N\nclass D:\n  class A: pass\n"
    assert sorted(name for name, _ in types_of(source)) == ["A", "A", "Bb", "D"]


def test_no_two_types_share_a_name():
    shared = {name: found for name, found in shared_names().items() if name not in ALIKE}
    assert not shared, "\n".join(f"{name}: {', '.join(found)}" for name, found in shared.items())


def test_alike_names_are_shared():
    """A name that is no longer shared leaves the list; none of them is a class."""
    shared = shared_names()
    assert set(shared) >= ALIKE
    assert not any("class" in place for name in ALIKE for place in shared[name])
