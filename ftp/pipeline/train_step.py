"""Cut a traced train step at its means over microbatches: what the stages compute for each
microbatch, and what follows once a step.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from ftp.dataclass import dataclass
from ftp.errors import CertificateError, InputError, TraceError
from ftp.ops.ancestors import ancestors
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.pipeline.check import Numbering, called
from ftp.pipeline.subgraphs import extracted


@dataclass(frozen=True)
class TrainStep:
    """A train step in two parts.

    Attributes:
        microbatch: ``params``, ``batch``, then ``constants`` in; results, then gradients out.
        params, batch: which inputs of the step it takes.
        constants: which captured tensors.
        results: how many results it has.
        leaves: per gradient the position of its parameter in ``params``.
        update: ``given``, the means, then ``update_constants`` in; the step's results out.
        means: per mean the output of ``microbatch`` that is averaged.
    """

    microbatch: fx.GraphModule
    params: tuple[int, ...]
    batch: tuple[int, ...]
    constants: tuple[int, ...]
    results: int
    leaves: tuple[int, ...]
    update: fx.GraphModule
    given: tuple[int, ...]
    means: tuple[int, ...]
    update_constants: tuple[int, ...]


@dataclass(frozen=True)
class Noted:
    """The means in the outputs of a traced step: its results, then each mean's value, then the
    parameters, then the batch tensors, then one microbatch of each.

    Attributes:
        results: of the step.
        is_gradient: per mean.
        batch: how many tensors ``ftp.optim.accumulate`` was to cut; without it the trace itself is
            of one microbatch.
    """

    results: int
    is_gradient: tuple[bool, ...]
    batch: int

    def rows(self, gm: fx.GraphModule) -> dict[int, int]:
        """Per input of the graph whose batch tensor ``accumulate`` cuts, the output that is one
        microbatch of it.
        """
        number = {n: i for i, n in enumerate(_inputs(gm))}
        outputs = _outputs(gm)
        first = len(outputs) - self.batch
        cut = outputs[first - self.batch : first] if self.batch else ()
        return {number[node]: first + k for k, node in enumerate(cut)}


def batch_of(gm: fx.GraphModule, noted: Noted, is_state: Sequence[bool]) -> tuple[int, ...]:
    """The inputs to cut into microbatches: those that ``accumulate`` was given; else those that the
    means depend on and that are no state.

    Raises:
        InputError: ``accumulate`` was given something else than arguments of the step.
    """
    inputs = {n: i for i, n in enumerate(_inputs(gm))}
    outputs = _outputs(gm)
    if noted.batch:
        asked = outputs[-2 * noted.batch : -noted.batch]
        if odd := [node for node in asked if node not in inputs]:
            source = odd[0].meta.get("source")
            raise InputError(
                "accumulate is given a tensor that the step computes"
                f"{f' at {source}' if source else ''}. In a step with a pipeline its batch is"
                " arguments of the step as they are: compute the rest in the function that is given"
                " to it."
            )
        return tuple(dict.fromkeys(inputs[node] for node in asked))
    values = outputs[noted.results : noted.results + len(noted.is_gradient)]
    needed = ancestors(values)
    return tuple(
        i
        for node, i in inputs.items()
        if i < len(is_state) and node in needed and not is_state[i] and node.meta["val"].ndim
    )


def cut_at_means(
    gm: fx.GraphModule, noted: Noted, names: Sequence[str], batch: Sequence[int]
) -> TrainStep:
    """A traced train step in its two parts.

    Args:
        names: of the arguments' tensors; the graph's other inputs are captured tensors.
        batch: the inputs that are cut into microbatches.

    Raises:
        InputError: a gradient that is of no argument; a mean that is no floating-point tensor.
        TraceError: what follows the gradients reads the batch.
    """
    inputs, outputs = _inputs(gm), _outputs(gm)
    number = {n: i for i, n in enumerate(inputs)}
    n, count = len(names), len(noted.is_gradient)
    rows = {i: outputs[at] for i, at in noted.rows(gm).items()} or {i: inputs[i] for i in batch}
    values = outputs[noted.results : noted.results + count]
    of = iter(outputs[noted.results + count :])
    leaf_of = [next(of) if is_gradient else None for is_gradient in noted.is_gradient]
    # Each output is a copy of the value for one microbatch.
    first: list[Any] = [value.args[0] for value in values]
    assert all(isinstance(x, fx.Node) for x in first)
    for node, leaf in zip(values, leaf_of, strict=True):
        source = f" at {node.meta['source']}" if node.meta.get("source") else ""
        if leaf is not None and number.get(leaf, n) >= n:
            raise InputError(
                f"The gradient{source} is of a tensor that the step computes. A pipeline takes"
                " gradients of arguments only: compute it in the function that is differentiated."
            )
        if not node.meta["val"].dtype.is_floating_point:
            raise InputError(
                f"The function that is differentiated{source} returns a tensor of"
                f" {node.meta['val'].dtype}, which has no mean over microbatches."
                " Return it in a floating-point dtype."
            )
    is_gradient = [leaf is not None for leaf in leaf_of]
    order = sorted(range(count), key=is_gradient.__getitem__)  # results, then gradients
    made = [first[i] for i in order]
    cut = set(rows.values())
    needed = ancestors(made, stop=cut) | {leaf for leaf in leaf_of if leaf is not None}
    params = [i for i in range(n) if inputs[i] in needed and inputs[i] not in cut]
    constants = [i - n for i in range(n, len(inputs)) if inputs[i] in needed]
    own = [i for i in batch if rows[i] in needed]
    at = {leaf: k for k, leaf in enumerate(params)}
    leaves = [at[number[leaf]] for i in order if (leaf := leaf_of[i]) is not None]
    if len(set(leaves)) < len(leaves):
        raise InputError("The step takes two gradients of one argument. A pipeline takes one.")
    taken = [*(inputs[i] for i in params), *(rows[i] for i in own)]
    microbatch = _part(gm, [*taken, *(inputs[n + c] for c in constants)], made)
    results = outputs[: noted.results]
    after = ancestors(results, stop=set(values))
    if read := [names[i] for i in batch if inputs[i] in after]:
        raise TraceError(
            f"{read[0]} is a batch argument that the step also reads outside of its gradient,"
            " where there are no microbatches. Compute values of it in the function that is"
            " differentiated, and return them as aux (has_aux=True): aux is averaged over the"
            " microbatches."
        )
    given = [i for i in range(n) if inputs[i] in after]
    captured = [i - n for i in range(n, len(inputs)) if inputs[i] in after]
    update = _part(
        gm,
        [*(inputs[i] for i in given), *values, *(inputs[n + c] for c in captured)],
        results,
    )
    place = {i: k for k, i in enumerate(order)}
    return TrainStep(
        microbatch,
        tuple(params),
        tuple(own),
        tuple(constants),
        count - sum(is_gradient),
        tuple(leaves),
        update,
        tuple(given),
        tuple(place[i] for i in range(count)),
        tuple(captured),
    )


def check_parts(gm: fx.GraphModule, noted: Noted, parts: TrainStep, arguments: int) -> None:
    """Raise unless the two parts, one after the other, compute the traced step.

    Args:
        arguments: the number of inputs, without captured tensors.

    Raises:
        CertificateError: a mean or a result that differs. That is a fault of ftp: please report it.
    """
    numbering, inputs, outputs = Numbering(), _inputs(gm), _outputs(gm)
    roots = [numbering.of(("input", i)) for i in range(len(inputs))]
    due = numbering.run(gm.graph, roots)
    means = range(noted.results, noted.results + len(noted.is_gradient))
    rows = noted.rows(gm)
    taken = [roots[i] for i in parts.params]
    taken += [due[rows[i]] if i in rows else roots[i] for i in parts.batch]
    taken += [roots[arguments + c] for c in parts.constants]
    made = numbering.run(parts.microbatch.graph, taken)
    leaves = iter(due[means.stop :])
    for k, at in enumerate(means):
        # A mean is one op of what the first part returns, of a parameter or of none.
        of = dict.fromkeys(outputs[at].all_input_nodes, f"%{made[parts.means[k]]}")
        args = mapped_arguments(outputs[at], of.__getitem__)
        if numbering.of(called(outputs[at].target, args)) != due[at]:
            raise CertificateError(f"Mean {k} of the step is not what its microbatches compute.")
        if noted.is_gradient[k]:
            leaf = parts.leaves[parts.means[k] - parts.results]
            if roots[parts.params[leaf]] != next(leaves):
                raise CertificateError(f"Mean {k} of the step is another parameter's gradient.")
    given = [roots[i] for i in parts.given] + [due[at] for at in means]
    given += [roots[arguments + c] for c in parts.update_constants]
    if numbering.run(parts.update.graph, given) != due[: noted.results]:
        raise CertificateError("What follows the gradients is not what the step computes.")


def is_alike_after(one: fx.GraphModule, other: fx.GraphModule, noted: Noted) -> bool:
    """Whether two traces of one step, for batches of different sizes, have the same ops after the
    means.
    """
    found: list[list[Any]] = []
    for gm in (one, other):
        outputs = _outputs(gm)
        means = outputs[noted.results : noted.results + len(noted.is_gradient)]
        of = {n: f"mean {i}" for i, n in enumerate(means)}
        of |= {n: f"input {i}" for i, n in enumerate(_inputs(gm)) if n not in of}
        after = ancestors(outputs[: noted.results], stop=of.keys())
        lines: list[Any] = []
        for node in gm.graph.nodes:
            if node in after and node not in of:
                of[node] = f"%{len(lines)}"
                lines.append((node.target, *mapped_arguments(node, of.__getitem__)))
        lines.append([of[n] for n in outputs[: noted.results]])
        found.append(lines)
    return found[0] == found[1]


def _inputs(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def _outputs(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.output_node().args[0])  # type: ignore[arg-type]


def _part(
    gm: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """The graph that computes ``outputs`` from ``inputs``."""
    needed = ancestors(outputs, stop=set(inputs)).difference(inputs)
    return extracted(inputs, [node for node in gm.graph.nodes if node in needed], outputs)
