"""Run the exported programs of ranks, on process groups or all in this process."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ftp.errors import InputError, MeshError
from ftp.exported.build import quiet
from ftp.exported.module_calls import call_signature
from ftp.partitioning.local_program import LocalProgram
from ftp.runtime.mesh_groups import groups_of
from ftp.runtime.simulate import BY_RANK, COLLECTIVES
from ftp.runtime.simulate import simulate as run_in_lockstep
from ftp.sharding.mesh import AnyMesh, require_coordinate, resolve
from ftp.sharding.mesh_groups import product_group
from ftp.torch_internals import pytree

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def bind(program: "ExportedProgram", mesh: AnyMesh | None = None) -> "ExportedProgram":
    """Bind a program that was made without processes, or loaded from a file, to process groups.

    Args:
        program: this rank's program, from ``ftp.shard_exported``.
        mesh: a mesh of processes; None for the one in use.

    Returns:
        A copy whose collectives use the groups of ``mesh``.

    Raises:
        MeshError: a mesh that this process is not part of.

    >>> import ftp
    >>> model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    >>> program = torch.export.export(model, (x,))
    >>> local = ftp.shard_exported(program, ftp.AbstractMesh(1, "tp"), {"weight": ftp.P("tp")})
    >>> torch.distributed.init_process_group(
    ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    ... )
    >>> bound = bind(local, ftp.make_mesh(1, "tp", device_type="cpu"))
    >>> torch.equal(bound.module()(x), model(x))
    True
    >>> torch.distributed.destroy_process_group()
    """
    m = resolve(mesh)
    require_coordinate(m)
    module = copy.deepcopy(program.graph_module)
    for node, old in zip(module.graph.nodes, program.graph.nodes, strict=True):
        node.name = old.name  # a copy renames a node with a builtin's name, such as input
    for node in _collectives(module.graph):
        name = node.args[-1]
        assert isinstance(name, str)
        if name.startswith("sim:"):
            axes = name.removeprefix("sim:").split(" × ")
            several = len(axes) > 1
            group = product_group(m, axes).group_name if several else m.group_name(*axes)
            node.args = (*node.args[:-1], group)
    module.recompile()
    with quiet():
        return program._update(module, copy.deepcopy(program.graph_signature))


def simulate(
    programs: Sequence["ExportedProgram"],
    mesh: AnyMesh | None,
    arguments: Sequence[tuple[Any, ...]],
) -> list[Any]:
    """Run the programs of all ranks in this process. Mutated buffers are written to their state.

    Args:
        programs: one for each rank, row-major on the mesh, for a mesh without processes.
        mesh: the mesh that they were made for; None for the one in use.
        arguments: per rank its positional arguments, local shards; for a program with keyword
            arguments, followed by a dict of them.

    Returns:
        The result of each rank.

    Raises:
        MeshError: not one program and one tuple of arguments for each rank; programs that are bound
            to process groups.
        InputError: arguments that do not fit a program's signature.

    >>> import ftp
    >>> model, x = torch.nn.Linear(4, 2), torch.ones(1, 4)
    >>> mesh, specs = ftp.simulated_mesh(2, "tp"), {"weight": ftp.P(None, "tp")}
    >>> program = torch.export.export(model, (x,))
    >>> ranks = [ftp.shard_exported(program, mesh, specs, rank=r) for r in range(2)]
    >>> torch.allclose(simulate(ranks, mesh, [(x,), (x,)])[1], model(x))
    True
    """
    m = resolve(mesh)
    if len(programs) != m.size() or len(arguments) != m.size():
        raise MeshError(
            f"The mesh {m} has {m.size()} ranks, but {len(programs)} programs and {len(arguments)}"
            " arguments are given."
        )
    locals_, inputs = [], []
    for program, given in zip(programs, arguments, strict=True):
        for node in _collectives(program.graph):
            name = str(node.args[-1])
            if not name.startswith("sim:"):
                raise MeshError(
                    "The programs are for a mesh of processes. Make them for"
                    " ftp.simulated_mesh(...) to run all of them in one process."
                )
            node.meta["axis"] = name.removeprefix("sim:")
        locals_.append(LocalProgram(program.graph_module, (), ()))
        inputs.append(_flat_inputs(program, given))
    with torch.no_grad():
        results = run_in_lockstep(locals_, inputs, groups_of(m))
    return [
        _delivered(program, given, flat)
        for program, given, flat in zip(programs, inputs, results, strict=True)
    ]


def _collectives(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target in COLLECTIVES or n.target in BY_RANK]


def _flat_inputs(program: "ExportedProgram", given: tuple[Any, ...]) -> list[Any]:
    signature = call_signature(program)
    keywords = pytree.tree_unflatten(range(signature.in_spec.num_leaves), signature.in_spec)[1]
    args, kwargs = (given[:-1], given[-1]) if keywords else (given, {})
    leaves, tree = pytree.tree_flatten((args, {k: kwargs[k] for k in keywords if k in kwargs}))
    if tree != signature.in_spec:
        raise InputError(f"The program takes {signature.in_spec}, but is given {tree}.")
    users = iter(leaves)
    held = {**program.state_dict, **program.constants}
    return [
        held[s.target] if s.target is not None else next(users)
        for s in program.graph_signature.input_specs
    ]


def _delivered(program: "ExportedProgram", inputs: Sequence[Any], flat: Sequence[Any]) -> Any:
    from torch.export.graph_signature import OutputKind

    specs = program.graph_signature.input_specs
    by_name = {s.arg.name: x for s, x in zip(specs, inputs, strict=True)}
    targets = {s.target: s.arg.name for s in specs if s.target is not None}
    results = []
    for spec, value in zip(program.graph_signature.output_specs, flat, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            results.append(value)
        else:
            by_name[targets.get(spec.target, spec.target)].copy_(value)  # type: ignore[arg-type]
    return pytree.tree_unflatten(results, call_signature(program).out_spec)
