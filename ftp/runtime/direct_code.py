"""Python code of a rank's graph, made and compiled in two thirds of the time of fx's, and run in
less: a call names its op by one global name instead of ``torch.ops.aten.mul.Tensor``.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx
from torch.fx.graph import CodeGen, PythonCode, _BoxedCodeGen

_PLAIN = {int, bool, str, type(None)}


class DirectCode(CodeGen):
    """Code of calls; of a graph with other nodes, fx's own."""

    def _gen_python_code(
        self, nodes: Any, root_module: str, namespace: Any, **options: Any
    ) -> PythonCode:
        given = list(nodes)
        if any(options.values()) or not all(map(_is_simple, given)):
            return super()._gen_python_code(nodes, root_module, namespace, **options)
        inputs = [node.name for node in given if node.op == "placeholder"]
        names = _GlobalNames({node.name for node in given})
        lines = list(_lines([node for node in given if node.op != "placeholder"], given, names))
        head = self.gen_fn_def(inputs, "")
        return PythonCode("\n    ".join(["\n" + head, *lines]), names.globals, None)


class BoxedDirectCode(DirectCode, _BoxedCodeGen):
    """Code that takes a list of inputs and empties it."""


def _is_simple(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return not node.args and node.name != "self"
    return node.op == "output" or (node.op == "call_function" and node.name != "self")


class _GlobalNames:
    """Global names of a code's ops and other values.

    Args:
        taken: names of nodes.
    """

    def __init__(self, taken: set[str]):
        self._prefix = "_"
        while any(name.startswith(self._prefix) for name in taken):
            self._prefix += "_"
        self.globals: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def of(self, value: Any) -> str:
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"{self._prefix}{len(self.globals)}"
            self.globals[name] = value  # which keeps it alive
        return name

    def text(self, value: Any) -> str:
        """An argument as code."""
        kind = type(value)
        if kind is fx.Node:
            return value.name
        if kind in _PLAIN:
            return repr(value)
        if isinstance(value, tuple):
            return f"({''.join(f'{self.text(x)}, ' for x in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self.text(x)}' for k, x in value.items())}}}"
        if kind is slice:
            parts = map(self.text, (value.start, value.stop, value.step))
            return f"{self.of(slice)}({', '.join(parts)})"
        return self.of(value)

    def call(self, node: fx.Node) -> str:
        target, args = node.target, node.args
        name = args[1] if target is getattr and len(args) == 2 else None
        if isinstance(name, str) and name.isidentifier():
            return f"{self.text(args[0])}.{name}"
        if target is operator.getitem:
            return f"{self.text(args[0])}[{self.text(args[1])}]"
        given = [*map(self.text, args), *(f"{k}={self.text(x)}" for k, x in node.kwargs.items())]
        return f"{self.of(target)}({', '.join(given)})"


def _lines(calls: list[fx.Node], nodes: list[fx.Node], names: _GlobalNames) -> Iterable[str]:
    """A line per node; a value is freed after the last line that reads it."""
    done = _last_reads(nodes)
    for node in calls:
        if node.op == "output":
            yield f"return {names.text(node.args[0])}"
            continue
        free = [x.name for x in done.get(node, ())]
        free += [] if node.users else [node.name]
        yield f"{node.name} = {names.call(node)}{';  ' if free else ''}{_none(free)}"


def _last_reads(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Per node, the values that no later node reads."""
    seen: set[fx.Node] = set()
    done: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        new = [x for x in node.all_input_nodes if x not in seen]
        seen.update(new)
        done[node] = new
    return done


def _none(names: list[str]) -> str:
    return f"{' = '.join(names)} = None" if names else ""


def forward_of(graph: fx.Graph, *, empties: bool = False) -> Callable[..., Any]:
    """A function that runs a graph.

    Args:
        empties: it takes a list of inputs, and empties it.
    """
    graph.set_codegen(BoxedDirectCode() if empties else DirectCode())
    return fx.GraphModule({}, graph).forward
