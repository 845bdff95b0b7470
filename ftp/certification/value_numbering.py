"""Value numbering: check that two single-device programs compute the same. Equal ops on equal
operands get one number, their class.
"""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from ftp.certification.certificate import Certificate, Operation, Ref
from ftp.errors import CertificateError, raise_all
from ftp.ops.ancestors import ancestors
from ftp.ops.choose import CHOOSE
from ftp.ops.constrain import CONSTRAIN
from ftp.ops.repeat_each import REPEAT_EACH, SUM_EACH
from ftp.ops.windows import WINDOWS
from ftp.per_rank.planned import expanded
from ftp.per_rank.program import LOCAL, program_of
from ftp.rules.along_dim import scan_between_flips
from ftp.rules.call import Call, Meta, replaced
from ftp.rules.decompositions.heads import OF_HEADS, merged_dim, repeated_dim, shares_keys
from ftp.rules.decompositions.registry import decomposition_of
from ftp.rules.decompositions.softmax import exponential_and_total
from ftp.rules.index import is_of_difference, is_sum_of_source
from ftp.rules.op_kinds import RESHAPES
from ftp.rules.windows import WINDOWED, FarApart, by_windows
from ftp.tracing.decompose import decompose

if TYPE_CHECKING:
    from ftp.tracing.symbolic import Symbolic

aten = torch.ops.aten


def check_traced(
    graph: fx.Graph, certificate: Certificate, symbolic: "Symbolic | None" = None
) -> None:
    """Check that the certificate's program is the traced one, up to merged common subexpressions
    and decompositions.

    Args:
        symbolic: the dynamic sizes of a program with formulas.

    Raises:
        CertificateError: the outputs that differ.
    """
    wrong = _differing(graph, certificate, _Numbers(symbolic))
    if wrong:
        wrong = _differing(graph, certificate, _Numbers(symbolic, in_parts=True))
    raise_all(CertificateError, wrong)


def _differing(graph: fx.Graph, certificate: Certificate, numbers: "_Numbers") -> list[str]:
    for op in certificate.operations:
        numbers.operation(op)
    inputs = iter([o for o in certificate.operations if o.target is None])
    for node in graph.nodes:
        if node.op == "placeholder":
            numbers.of[node] = numbers.of[Ref(next(inputs).name)]
    outputs = numbers.run(graph)
    return [
        f"output {i}, {ref.name}, is not what the traced program returns there"
        for i, (traced, (ref, _)) in enumerate(zip(outputs, certificate.outputs, strict=True))
        if traced != numbers.of[ref]
    ]


class _Numbers:
    """The classes of values. An op and its decomposition have one class.

    Args:
        in_parts: number the certificate's ops by their decompositions: of two equal ops the planner
            may decompose one.
    """

    def __init__(self, symbolic: "Symbolic | None", in_parts: bool = False):
        self.symbolic = symbolic
        self.in_parts = in_parts
        self.classes: dict[Any, Any] = {}
        self.of: dict[Any, Any] = {}
        self.made: dict[Any, Any] = {}
        self.metas: dict[Ref, Meta] = {}  # of the certificate's values
        self.windows: set[tuple[int, int]] = set()  # number and dim of the certificate's windows
        self._live: dict[fx.Graph, set[fx.Node]] = {}

    def key(self, target: Any, args: Any, kwargs: Any, index: int) -> Any:
        if target is CHOOSE:
            args = args[:3]  # without the cond's number, which `ftp.certification.branches` checks
        return (
            target,
            repr(self.numbered(tuple(args))),
            repr(sorted(self.numbered(dict(kwargs)).items())),
            index,
        )

    def numbered(self, tree: Any) -> Any:
        if isinstance(tree, fx.Node | Ref):
            return ("value", self.of[tree])
        if isinstance(tree, list | tuple):
            return [self.numbered(t) for t in tree]
        if isinstance(tree, dict):
            return {k: self.numbered(v) for k, v in tree.items()}
        return tree

    def operation(self, op: Operation) -> None:
        """Number the results of an operation of the certificate. Laws hold for it too: of equal ops
        the planner may rewrite some, and leave others.
        """
        refs = [Ref(op.name, index) for index in range(len(op.results))]
        self.metas.update(zip(refs, op.results, strict=True))
        by_law = self.by_law(op)
        if op.target is WINDOWS:
            self.windows.add((op.args[2], op.args[1]))
        elif op.target in (aten.index_select.default, aten.index_add.default):
            self.windows.add((1, op.args[1]))  # of a slice of few elements
        parts = self.decomposed(op) if self.in_parts and by_law is None else None
        for ref in refs:
            if op.target is None:
                key = ("input", op.name)
            else:
                key = by_law or self.key(op.target, op.args, op.kwargs, ref.index)
            part = None if parts is None else parts[ref.index]
            new = len(self.classes) if part is None else part
            self.of[ref] = self.classes.setdefault(key, new)
        self.made.setdefault(self.of[refs[0]], op)

    def by_law(self, call: Any) -> Any:
        """The key of an equal call, by a law of algebra; None where none holds."""
        law = _LAWS.get(call.target)
        return None if law is None else law(self, call)

    def run(self, graph: fx.Graph) -> list[Any]:
        for node in graph.nodes:
            if node.op == "output":
                return [self.of.get(n) if isinstance(n, fx.Node) else None for n in node.args[0]]
            if node.op == "placeholder":
                continue
            if node.target is operator.getitem:
                self.of[node] = self.of[node.args[0]][node.args[1]]
            elif node.target is CONSTRAIN:
                self.of[node] = self.of[node.args[0]]
            else:
                found = self.call(node)
                self.of[node] = found[0] if _is_tensor(node) else found
        raise AssertionError("a graph has an output")

    def call(self, node: fx.Node) -> list[Any]:
        if node.target is LOCAL:
            return self.local(node)
        count = 1 if _is_tensor(node) else len(node.meta["val"])
        keys = [self.key(node.target, node.args, node.kwargs, i) for i in range(count)]
        if (by_law := self.by_law(node)) is not None:
            keys = [by_law]
        elif keys[0] not in self.classes:
            if (repeated := self.repeated(node)) is not None:
                return repeated
            if (inner := self.decomposed(node)) is not None:
                return inner
        made = [self.classes.setdefault(key, len(self.classes)) for key in keys]
        self.made.setdefault(made[0], node)
        return made

    def by(self, x: Any, target: Any) -> Any:
        """The call of ``target`` that makes a value; None if another op makes it."""
        found = self.maker(x)
        return found if found is not None and found.target is target else None

    def maker(self, x: Any) -> Any:
        """The call that makes a value; None for a number."""
        return self.made.get(self.of[x]) if isinstance(x, fx.Node | Ref) else None

    def meta(self, x: Any) -> Meta:
        """The shape and dtype of a value, or of the one result of a call."""
        if isinstance(x, Ref):
            return self.metas[x]
        return x.results[0] if isinstance(x, Operation) else _val(x)

    def shapes(self, call: Any) -> list[tuple[int, ...]]:
        """Of the tensors that an op is given, one that is given twice too."""
        return [tuple(self.meta(x).shape) for x in call.args if isinstance(x, fx.Node | Ref)]

    def is_zeros(self, x: Any) -> bool:
        return (made := self.maker(x)) is not None and is_zeros(made)

    def local(self, node: fx.Node) -> list[Any]:
        """The classes of the results of per-rank code. The certificate's program may lack results
        without users.
        """
        arguments: Any = node.args
        operands, key = arguments
        if (program := program_of(key)).is_planned:
            graph = expanded(program)
            inputs = [n for n in graph.nodes if n.op == "placeholder"]
            self.of.update({n: self.of[x] for n, x in zip(inputs, operands, strict=True)})
            return self.run(graph)
        every = range(len(node.meta["val"]))
        kept, taken = list(every), list(range(len(operands)))
        if self.key(LOCAL, node.args, {}, 0) not in self.classes:
            kept = sorted(self.used(node))
            if not kept:
                return [None for _ in every]
            program, taken = program_of(key).giving(kept)
            key = program.key
        args = ([operands[i] for i in taken], key)
        return [
            self.classes.get(self.key(LOCAL, args, {}, kept.index(i))) if i in kept else None
            for i in every
        ]

    def used(self, node: fx.Node) -> set[Any]:
        """Which of an op's results an output depends on."""
        live = self.live(node.graph)
        items: Any = [n.args[1] for n in node.users if n.target is operator.getitem and n in live]
        return set(items)

    def live(self, graph: fx.Graph) -> set[fx.Node]:
        """The nodes that an output depends on. Per-rank code depends on the operands that its used
        results need.
        """
        if graph not in self._live:
            every = ancestors(n for n in graph.nodes if n.op == "output")
            found: set[fx.Node] = set()
            for node in reversed(graph.nodes):
                if node not in every or node.target is operator.getitem:
                    continue
                inputs: Any = node.all_input_nodes
                if node.target is LOCAL:
                    arguments: Any = node.args
                    operands, key = arguments
                    items: Any = {u.args[1] for u in node.users if u in found}
                    kept = sorted(items)
                    if 0 < len(kept) < len(node.meta["val"]):
                        _, taken = program_of(key).giving(kept)
                        inputs = [operands[i] for i in taken]
                found.update(inputs)
            self._live[graph] = found
        return self._live[graph]

    def sum_of_scatter(self, node: Any) -> Any:
        """The key of a sum over the dim along which ``scatter_add`` adds values to zeros: it is the
        sum of the values.
        """
        if (scatter := self.by(node.args[0], aten.scatter_add.default)) is None:
            return None
        onto, dim, index, source = scatter.args
        shapes = (self.meta(onto).shape, dim, self.meta(index).shape, self.meta(source).shape)
        if not self.is_zeros(onto) or not is_sum_of_source(shapes, node.args[1]):
            return None
        return self.key(node.target, (source, *node.args[1:]), node.kwargs, 0)

    def exponential_again(self, node: Any) -> Any:
        """The key of the exponential of a log-softmax as a quotient."""
        found = exponential_and_total(
            node.args[0], self.maker, lambda x, y: self.of[x] == self.of[y]
        )
        return None if found is None else self.key(aten.div.Tensor, found, {}, 0)

    def scatter_onto_rest(self, node: Any) -> Any:
        """The key of ``zeros.scatter_add(dim, index, values) - p * row`` with one pass less."""
        scatter, rest = (
            self.by(node.args[0], aten.scatter_add.default),
            self.by(node.args[1], aten.mul.Tensor),
        )
        if node.kwargs or scatter is None or rest is None or not self.is_zeros(scatter.args[0]):
            return None
        p, row = rest.args
        if not isinstance(row, fx.Node | Ref) or self.meta(row).dtype != self.meta(node).dtype:
            return None  # a mask has no negative, and that of an unsigned number is large
        if len({self.meta(x) for x in (node, scatter, rest)}) > 1:
            return None
        product = self.result(aten.mul.Tensor, p, self.result(aten.neg.default, row))
        return self.key(scatter.target, (product, *scatter.args[1:]), {}, 0)

    def gather_before_difference(self, node: Any) -> Any:
        """The key of ``(x - row).gather(dim, index)``, where ``row`` has one element along ``dim``,
        with the difference taken last.
        """
        less = self.by(node.args[0], aten.sub.Tensor)
        if (
            less is None
            or less.kwargs
            or node.kwargs
            or not isinstance(less.args[1], fx.Node | Ref)
        ):
            return None
        shapes = [tuple(self.meta(x).shape) for x in (less, *less.args, node.args[2])]
        if not is_of_difference(shapes, node.args[1]):
            return None
        gathered = self.result(node.target, less.args[0], *node.args[1:])
        return self.key(less.target, (gathered, less.args[1]), {}, 0)

    def repeated(self, node: Any) -> list[Any] | None:
        """The classes of a view that repeats elements, of the sum that is its gradient, and of
        attention with shared keys, if the certificate's program has special ops for them.
        """
        if node.target is aten.sum.dim_IntList:
            found = self.sum_of_repeated(node)
        elif node.target in RESHAPES:
            found = self.repeated_by_view(node)
        elif node.target in OF_HEADS and shares_keys(node.target, self.shapes(node)):
            return self.known_by(node, OF_HEADS[node.target])
        elif node.target in WINDOWED:
            return self.reverse_scan(node) or self.on_windows(node)
        else:
            return None
        return None if found is None else [self.of[found]]

    def known_by(self, node: Any, by: Callable[..., Any]) -> list[Any] | None:
        """The classes of an op by a decomposition, if the certificate's program has it. The program
        may lack results without users.
        """
        used = None if _is_tensor(node) else self.used(node)

        def by_used(*args: Any, **kwargs: Any) -> Any:
            made = by(*args, **kwargs)
            return made if used is None else [x if i in used else None for i, x in enumerate(made)]

        known = len(self.classes)
        classes = self.decomposed(node, by_used)
        for key in list(self.classes)[known:]:
            self.made.pop(self.classes.pop(key), None)
        is_known = classes and all(found is None or found < known for found in classes)
        return classes if is_known else None

    def on_windows(self, node: Any) -> list[Any] | None:
        """The classes of an op that the certificate's program computes on windows."""
        for at in sorted(self.windows):
            # An op within the windows of one axis may be on the windows of another.
            self.windows.remove(at)
            try:
                found = self.known_by(node, by_windows(node.target, *at))
            except FarApart:
                found = None
            self.windows.add(at)
            if found is not None:
                return found
        return None

    def reverse_scan(self, flip: Any) -> list[Any] | None:
        """The class of a scan between flips, if the certificate's program has it as one op, or
        computes this op on windows.
        """
        scan = _call(flip)
        if not isinstance(scan, _OneOp):
            return None
        whole = self.known(scan.target, *scan.args)
        return self.on_windows(scan) if whole is None else [self.of[whole]]

    def sum_of_repeated(self, total: Any) -> Ref | None:
        view, (dim, *more) = total.args[0], total.args[1]
        if view.target not in RESHAPES or more or _val(total).dtype != _val(view).dtype:
            return None
        shape = tuple(_val(view).shape)
        if merged_dim(shape, tuple(_val(view.args[0]).shape)) != dim - 1:
            return None
        found = self.known(SUM_EACH, view.args[0], shape[dim], dim - 1)
        if found is None or _val(total).ndim < len(shape):
            return found
        return self.known(aten.unsqueeze.default, found, dim)

    def repeated_by_view(self, view: Any) -> Ref | None:
        many = view.args[0]
        many = many.args[0] if many.target is aten.clone.default else many
        if many.target is not aten.expand.default:
            return None
        few, *shapes = many.args[0], tuple(_val(many).shape), tuple(_val(view).shape)
        dim = repeated_dim(tuple(_val(few).shape), *shapes)
        if dim is None:
            return None
        found = self.known(aten.squeeze.dim, few, dim + 1)
        return found and self.known(REPEAT_EACH, found, shapes[0][dim + 1], dim)

    def result(self, target: Any, *args: Any) -> Ref:
        """The result of a call, which no program need make."""
        key = self.by_law(Call(target, args, {}, ())) or self.key(target, args, {}, 0)
        number = self.classes.setdefault(key, len(self.classes))
        self.of[found := Ref(f"class {number}")] = number
        return found

    def known(self, target: Any, of: Any, *args: Any) -> Ref | None:
        """The result of a call, if the certificate's program makes the call."""
        number = self.classes.get(self.key(target, (of, *args), {}, 0))
        if number is None:
            return None
        self.of[found := Ref(f"class {number}")] = number
        return found

    def decomposed(self, node: Any, by: Callable[..., Any] | None = None) -> list[Any] | None:
        by = by or decomposition_of(node, self.shapes(node))
        if by is None:
            return None
        operands: list[Any] = []

        def meta(x: Any) -> Meta:
            operands.append(x)
            return self.meta(x)

        args, kwargs = replaced((node.args, dict(node.kwargs)), (fx.Node, Ref), meta)
        gm = decompose(node.target, args, kwargs, by, self.symbolic)
        assert gm is not None
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.of.update({n: self.of[x] for n, x in zip(inputs, operands, strict=True)})
        return self.run(gm.graph)


_LAWS: dict[Any, Callable[[_Numbers, Any], Any]] = {
    aten.sum.dim_IntList: _Numbers.sum_of_scatter,
    aten.exp.default: _Numbers.exponential_again,
    aten.sub.Tensor: _Numbers.scatter_onto_rest,
    aten.gather.default: _Numbers.gather_before_difference,
}  # each gives the key of an equal call, as `ftp.planning.algebra` writes it


class _OneOp(NamedTuple):
    """An op that stands for several nodes of a traced program."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]


def _call(x: Any) -> Any:
    """The call that makes a value of a traced program; a scan between flips is one from the other
    end. None for what is no call.
    """
    if not isinstance(x, fx.Node) or x.op != "call_function" or not _is_tensor(x):
        return None
    found = scan_between_flips(x, _call, _val(x).ndim)
    if found is None:
        return x
    target, of, dim = found
    return _OneOp(target, (of, dim), {}, x.meta)


def _is_tensor(node: Any) -> bool:
    return isinstance(node.meta["val"], torch.Tensor | Meta)


def _val(node: Any) -> Meta:
    return Meta.of(node.meta["val"])


def is_zeros(node: Any) -> bool:
    zeros = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
    fills = (aten.full.default, aten.full_like.default, aten.new_full.default)
    return node.target in zeros or (node.target in fills and node.args[-1] == 0)
