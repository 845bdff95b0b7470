"""Decisions by an error's text stand in one file."""

import ast
from pathlib import Path

import torch

from ftp.torch_internals.error_texts import Meaning, meaning_of

PACKAGE = Path(__file__).parents[2] / "ftp"


def decisions(source: str) -> list[int]:
    """Lines that compare or search the text of a caught error."""
    caught, found = set(), []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.name:
            caught.add(node.name)
        if isinstance(node, ast.arg) and "Error" in ast.unparse(node.annotation or node):
            caught.add(node.arg)
        if isinstance(node, ast.arg) and "Exception" in ast.unparse(node.annotation or node):
            caught.add(node.arg)

    def reads(node: ast.AST) -> bool:
        return any(
            isinstance(n, ast.Call)
            and isinstance(n.func, ast.Name)
            and n.func.id in ("str", "repr")
            and isinstance(n.args[0], ast.Name)
            and n.args[0].id in caught
            for n in ast.walk(node)
            if not isinstance(n, ast.Call) or n.args
        )

    for node in ast.walk(tree):
        is_compared = isinstance(node, ast.Compare) and reads(node)
        is_searched = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("search", "match", "fullmatch", "startswith", "endswith")
            and reads(node)
        )
        if is_compared or is_searched:
            found.append(node.lineno)
    return found


def test_the_search_finds_decisions():
    source = "try: f()\nexcept ValueError as e:\n  if 'x' in str(e): pass\n  raise A(str(e))\n"
    assert decisions(source) == [3]
    source = "def f(error: Exception):\n  return re.search('x', str(error)) or str(error)\n"
    assert decisions(source) == [2]


def test_no_other_file_decides_by_the_text_of_an_error():
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := decisions(path.read_text()))
    }
    assert set(found) == {"torch_internals/error_texts.py"}, found


def test_a_users_own_errors_have_no_meaning():
    assert meaning_of(ValueError("a file of another dtype")) is None
    assert meaning_of(ValueError("call .item() first")) is None
    assert meaning_of(RuntimeError("no")) is None


def test_torch_says_so():
    """Texts of this torch, of the errors that need no transform."""
    leaf = torch.ones(2, requires_grad=True)
    calls = {
        Meaning.NOT_REQUIRING_GRAD: lambda: torch.ones(2).sum().backward(),
        Meaning.MUTATES_LEAF: lambda: leaf.add_(1),
        Meaning.DTYPES: lambda: torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.float64),
        Meaning.NO_PROCESS_GROUP: torch.distributed.get_world_size,
        Meaning.CALLS_BACKWARD: lambda: torch.func.grad(lambda x: x.sum().backward())(leaf),
    }
    found = {}
    for meaning, call in calls.items():
        try:
            call()
        except (RuntimeError, ValueError) as error:
            found[meaning] = meaning_of(error)
    assert found == {meaning: meaning for meaning in calls}
