"""Make a function that runs a rank's graph: by fx's eager code, or by inductor's code without
torch.compile's guards and wrappers.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from ftp.errors import CodeWarning
from ftp.ops.kernel_strides import kernel_of, traced_kernels
from ftp.ops.philox import AS_TENSOR_OPS
from ftp.passes.buffer_reuse import has_shape_of, in_place, python_forms, with_values
from ftp.passes.inline_small_ops import small_matmuls
from ftp.passes.offset_tensors import with_offset_tensors
from ftp.passes.onednn_matmuls import Choose
from ftp.passes.outline_branches import outline_branches
from ftp.paused_gc import collection_paused
from ftp.rules.local_op import as_module
from ftp.runtime import kept_code
from ftp.runtime.direct_code import forward_of
from ftp.runtime.divided_work import divided
from ftp.runtime.gloo_calls import call_directly
from ftp.runtime.inductor_kernels import compiled_together
from ftp.runtime.lowering import for_eager, for_inductor, ordered
from ftp.runtime.shared_memory import directly, exchanges_of_rows
from ftp.runtime.split_at_collectives import Subgraph, split, with_subgraphs
from ftp.torch_internals import deferred_compiler, deferred_templates
from ftp.torch_internals.fake_tensors import mode_for
from ftp.torch_internals.inductor_wrappers import Compiled
from ftp.torch_internals.tracer_lock import TRACING

aten = torch.ops.aten
SYMBOLIC = (torch.SymInt, torch.SymFloat)
Run = Callable[[Sequence[Any]], Sequence[torch.Tensor]]


@collection_paused()
def eager(
    graph: fx.Graph,
    inputs: Sequence[Any],
    donated: Sequence[int],
    *,
    host: bool = True,
    empties: bool = False,
) -> Run:
    """A function that runs the nodes one after another and writes to donated inputs.

    Args:
        inputs: of the shapes and strides that the function will be given.
        host: the host chooses one branch of a cond to run; otherwise both run.
        empties: the function takes a list and empties it, so that an input which nobody else holds
            is freed after its last use.
    """
    return running(executed(graph, inputs, donated), donated, host=host, empties=empties)


def executed(graph: fx.Graph, inputs: Sequence[Any], donated: Sequence[int]) -> fx.Graph:
    """The graph that `eager` runs: the nodes in their order, with their writes."""
    return for_eager(graph, dense(inputs, donated), donated, exchanges_of_rows())


@collection_paused()
def running(
    graph: fx.Graph, donated: Sequence[int], *, host: bool = True, empties: bool = False
) -> Run:
    """The function of `eager`, of a graph that `executed` made, which is used up."""
    written = _direct(graph)
    written = outline_branches(written) if host else written
    if not empties:
        forward = forward_of(written)
        return lambda given: forward(*dense(given, donated))
    emptying = forward_of(written, empties=True)

    def run(given: Any) -> Sequence[torch.Tensor]:
        taken = dense(given, donated)
        given.clear()
        return emptying(taken)

    return run


def _direct(graph: fx.Graph) -> fx.Graph:
    """Replace small ops, whose call costs more than their work, by their cheapest call: ftp's own
    collectives without the dispatcher, ``x.data`` for ``x.detach()`` (a third of an op's time, not
    half).
    """
    call_directly(graph)
    for node in graph.nodes:
        if (issue := directly(node)) is not None:
            node.target = issue
        elif node.target is aten.detach.default:
            node.target, node.args = getattr, (node.args[0], "data")
        else:
            node.target = kernel_of(node.target)
    return graph


def dense(given: Sequence[Any], at: Sequence[int]) -> list[Any]:
    """The inputs, contiguous at these positions: an expanded tensor cannot be written to."""
    found = list(given)
    for i in at:
        found[i] = found[i].contiguous()
    return found


def compiled(
    graph: fx.Graph,
    inputs: Sequence[Any],
    donated: Sequence[int],
    choose: Choose,
    *,
    host: bool = True,
    code: Mapping[str, Compiled] | None = None,
) -> Run:
    """Inductor's code for the subgraphs between collectives, called directly. A step has checked
    its arguments, so there are no guards.

    With symbolic ``inputs`` the code serves all sizes that meet the guards in their ``ShapeEnv``;
    among the inputs must be the numbers that shapes are computed from.

    Args:
        choose: see `subgraphs_of`.
        code: of subgraphs, by key; others are compiled.
    """
    tensors = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
    graph, subgraphs, held = subgraphs_of(graph, inputs, donated, choose)
    keys = [subgraph.key() for subgraph in subgraphs]
    made = _compiled_once(dict(zip(keys, subgraphs, strict=True)), code or {})
    called = _direct(with_subgraphs(graph, subgraphs, [made[key] for key in keys]))
    forward = forward_of(outline_branches(called) if host else called)
    # The code is compiled for dense inputs.
    return lambda given: forward(*dense(given, tensors), *held)


def subgraphs_of(
    graph: fx.Graph, inputs: Sequence[Any], donated: Sequence[int], choose: Choose
) -> tuple[fx.Graph, list[Subgraph], list[torch.Tensor]]:
    """A rank's graph for inductor, its subgraphs between collectives, and tensors of this rank that
    the graph takes after its other inputs.

    An output that a chain of elementwise ops computes from a donated input is written to that
    input's memory. Numbers among the inputs, the offsets of this rank's shards, become tensors
    where they can, else constants of the code. ``choose`` picks the matmuls for oneDNN.
    """
    from ftp.runtime.local_shapes import known_numbers  # of the partitioner; eager runs do without

    inputs = dense(inputs, [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)])
    gm = with_values(as_module(ordered(graph)), inputs)
    graph = for_inductor(gm.graph, donated, choose)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    given = dict(zip(placeholders, inputs, strict=True))
    plain = {node: x for node, x in given.items() if not isinstance(x, (torch.Tensor, *SYMBOLIC))}
    numbers = known_numbers(graph.nodes, plain)
    symbols = [node for node, x in given.items() if isinstance(x, torch.SymInt) and is_symbol(x)]
    held = with_offset_tensors(graph, numbers)
    written = _written(graph, [placeholders[i] for i in donated])
    return graph, split(graph, numbers, written, symbols), held


def is_symbol(x: torch.SymInt) -> bool:
    """Whether a symbolic int is a symbol, rather than a formula of symbols."""
    return x.node.expr.is_Symbol


def _compiled_once(
    subgraphs: Mapping[str, Subgraph], known: Mapping[str, Compiled]
) -> Mapping[str, Compiled]:
    """Inductor's code for each subgraph: what is known, that of an earlier start, else compiled."""
    missing = {key: subgraph for key, subgraph in subgraphs.items() if key not in known}
    if not missing:
        return known
    name = kept_code.key_of(missing)
    if name and (kept := kept_code.find(name)) is not None:
        return {**known, **kept[1]}
    if known:
        warnings.warn(
            f"The program's file has no code for {len(missing)} of this rank's {len(subgraphs)}"
            " compiled parts, which are compiled here. It was made with another FTP_SHM, or on"
            " another first rank, whose choice of matmul kernels differs.",
            CodeWarning,
            stacklevel=2,
        )
    made = by_inductor(missing)
    if name:
        kept_code.keep(name, made)
    return {**known, **{key: _called(graph) for key, graph in made.items()}}


def by_inductor(subgraphs: Mapping[str, Subgraph]) -> dict[str, Any]:
    """Each subgraph's ``CompiledFxGraph``."""
    with TRACING:
        deferred_compiler.load()
        with compiled_together():
            return _divided(subgraphs)


def _divided(subgraphs: Mapping[str, Subgraph]) -> dict[str, Any]:
    """Each subgraph compiled by inductor; ranks of a host divide those that its cache keeps."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    is_kept = config.fx_graph_cache and not config.force_disable_caches
    kept = [key for key, subgraph in subgraphs.items() if is_kept and not subgraph.is_symbolic]
    made = divided(kept, Path(cache_dir()), lambda key: _compiled(subgraphs[key]))
    return {key: made.get(key) or _compiled(subgraphs[key]) for key in subgraphs}


def _called(graph: Any) -> Compiled:
    """The function of a compiled graph, without the graph's own checks."""
    call = graph.current_callable

    def run(inputs: list[Any]) -> Sequence[Any]:
        return call(inputs)

    return run


def _compiled(subgraph: Subgraph) -> Any:
    """Inductor's ``CompiledFxGraph`` of one subgraph."""
    inductor = deferred_templates.compiler()
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    table = {**traced_kernels(), **select_decomp_table(), **AS_TENSOR_OPS, **small_matmuls()}
    values = subgraph.values()
    env = next((v.node.shape_env for v in values if isinstance(v, SYMBOLIC)), None)
    with torch.no_grad(), mode_for(env) as mode, python_forms(mode):
        fake = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
            if isinstance(v, torch.Tensor)
            else v
            for v in values
        ]
        gm = make_fx(
            fx.GraphModule({}, subgraph.graph), decomposition_table=table, tracing_mode="real"
        )(*fake)
    output = gm.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    count = len(subgraph.outputs)
    with gm.graph.inserting_before(output):
        for value, (_, old) in zip(results[count:], subgraph.writes, strict=True):
            gm.graph.call_function(
                aten.copy_.default, (placeholders[subgraph.inputs.index(old)], value)
            )
    output.args = (tuple(results[:count]),)
    output.meta["user_visible_output_idxs"] = list(range(count))  # others rely on their strides
    gm.graph.eliminate_dead_code()
    gm.recompile()
    # A step is recorded as a whole, if at all. It has checked sizes, and made inputs dense: on a
    # CPU a second check of sizes and strides takes as long as a small subgraph itself.
    changes: dict[str, Any] = {"triton.cudagraphs": False}
    devices = {x.device.type for x in fake if isinstance(x, torch.Tensor)}
    if devices <= {"cpu"}:
        changes |= {"size_asserts": False, "alignment_asserts": False}
    if env is not None:  # a stored graph brings the guards of the sizes that it was stored with
        changes |= {"fx_graph_cache": False}
    else:
        mode.shape_env = ShapeEnv()  # without one inductor's cache keeps nothing
    keys: Any = torch.compiler.config
    tag = keys.cache_key_tag
    if not devices or "cpu" in devices:
        # Inductor's key lacks the vector extension for which a stored kernel is written.
        isa = pick_vec_isa()
        tag = f"{tag} {isa} {isa.bit_width()}"
    with (
        torch.no_grad(),
        tracing(TracingContext(mode)),
        config.patch(changes),
        keys.patch(cache_key_tag=tag),
    ):
        return inductor.compile_fx_inner(gm, fake, is_inference=True)


def _written(graph: fx.Graph, donated: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Per output, the donated input of its shape from which a chain of elementwise ops computes it
    (through their first operands); each input at most once.
    """
    found: dict[fx.Node, fx.Node] = {}
    for value in graph.output_node().args[0]:  # type: ignore[union-attr]
        node = value
        while (
            isinstance(node, fx.Node)
            and in_place(node) is not None
            and isinstance(node.args[0], fx.Node)
        ):
            node = node.args[0]
        if node is value or node not in donated or value in found or node in found.values():
            continue
        old, new = node.meta["val"], value.meta["val"]
        if old.dtype == new.dtype and has_shape_of(old, new):
            found[value] = node
    return found
