"""Save a planned program to a file, and load it, ready to run on any rank of its mesh."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import optree
import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.errors import CodeWarning, FtpError, MeshError, ProgramFileError, ReportError
from ftp.partitioning.local_program import LocalProgram
from ftp.partitioning.rank_tables import classes
from ftp.paused_gc import collection_paused
from ftp.planning.plan import Plan
from ftp.program_files.container import Container, damaged, pack, read_file, write_file
from ftp.program_files.graphs import (
    read_local,
    read_plan,
    read_traced,
    write_local,
    write_plan,
    write_traced,
)
from ftp.program_files.plain import Reader, Writer
from ftp.program_files.trees import read_tree, write_tree
from ftp.runtime.mesh_groups import axes_of_groups
from ftp.runtime.program import Program
from ftp.runtime.saved_code import NO_CODE, CodeFacts, SavedCode, ready
from ftp.sharding.mesh import Mesh, mesh_device
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.global_shapes import without_addresses
from ftp.version import __version__

_GIVEN = (
    "tensor_leaves", "in_specs", "out_leaves", "is_static", "leaf_specs", "roles", "donated",
    "assumptions", "options", "hardware",
)  # fmt: skip
_COMPUTED = ("out_specs", "out_shapes", "fingerprint", "trial_rules", "renewed")


@dataclass(frozen=True)
class Signature:
    """The form of a program's calls.

    Attributes:
        function: the function's name, for messages.
        arguments: names of the positional arguments.
        names: of each leaf of the arguments.
        tree: the structure of the arguments, as text that is equal on all ranks.
        leaves: a ``Meta`` of each tensor's global shape and dtype; a static value.
        state: positions of the arguments that are state.
        default_dtype: torch's default dtype where the function was traced.
    """

    function: str
    arguments: tuple[str, ...]
    names: tuple[str, ...]
    tree: str
    leaves: tuple[Any, ...]
    state: tuple[int, ...]
    default_dtype: torch.dtype


def tree_text(tree: optree.PyTreeSpec) -> str:
    """A structure as text that is equal on all ranks."""
    return without_addresses(str(tree))


def versions() -> dict[str, str]:
    """The versions that a file must have been made with."""
    return {"ftp": __version__, "torch": str(torch.__version__)}


def save(
    path: str | Path,
    program: Program,
    signature: Signature,
    given: optree.PyTreeSpec | None,
    code: tuple[Mapping[str, Any], bytes] | None = None,
) -> None:
    """Write a program to a file.

    Args:
        given: the structure of the arguments; a loaded program needs none.
        code: of `code_of_ranks`.

    Raises:
        ProgramFileError: a program with values that are not plain data, or a path that cannot be
            written to.
    """
    if given is None:
        assert isinstance(program, LoadedProgram)
        header, sections = program.header, program.sections
    else:
        header, sections = _parts(program, signature, given)
    if code is not None:
        facts, functions = code
        sections = {**sections, _FACTS: _json(facts), _CODE: functions}
    write_file(Path(path).absolute(), pack(header, sections))


_FACTS, _CODE = "facts of code", "code"


@collection_paused()
def _parts(
    program: Program, signature: Signature, given: optree.PyTreeSpec
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The header and the sections of a program's file."""
    mesh = program.mesh
    call, traced = Writer(), Writer()
    constants = [_bytes_of(c, i) for i, c in enumerate(program.constants)]
    content = {
        "signature": [call.of(getattr(signature, name)) for name in _OF_SIGNATURE],
        "program": [call.of(_plain(getattr(program, name))) for name in (*_GIVEN, *_COMPUTED)],
        "tree": write_tree(program.out_tree, given),
        "constants": [[call.of(c.dtype), list(c.shape)] for c in program.constants],
        "pool": call.pool,
    }
    written = write_traced(traced, program.traced.graph)
    sections = {
        "call": _json(content),
        "ranks": _json(ranks_section(program, program.mesh.size())),
        "plan": plan_section(program.plan),
        "traced": _json({**written, "pool": traced.pool}),
        **{f"constant {i}": of for i, of in enumerate(constants)},
    }
    header = {
        **versions(),
        "mesh": [list(mesh.shape), list(mesh.axis_names), mesh.device_type, mesh.is_ascending],
        "function": signature.function,
    }
    return header, sections


_OF_SIGNATURE = ("function", "arguments", "names", "tree", "leaves", "state", "default_dtype")


def ranks_section(program: Program, most: int) -> dict[str, Any]:
    """The ranks' graphs, and the graph of each rank; if there are more than ``most``, only that of
    this process' rank.
    """
    mesh, coordinates = program.mesh, program.mesh.coordinates()
    own = coordinates.index(mesh.coordinate) if mesh.coordinate in coordinates else 0
    writer = Writer(mesh_device(mesh))
    numbers: dict[fx.GraphModule, int] = {}
    programs: list[Any] = []
    of_rank = [-1] * len(coordinates)
    for at in (own, *(range(len(coordinates)) if most > 1 else ())):
        local = program.local(coordinates[at])
        if local.gm not in numbers:
            if len(programs) == most:
                of_rank = [0 if i == own else -1 for i in range(len(coordinates))]
                del programs[1:]
                break
            numbers[local.gm] = len(programs)
            programs.append(write_local(writer, local, axes_of_groups(mesh)))
        of_rank[at] = numbers[local.gm]
    return {"programs": programs, "of_rank": of_rank, "pool": writer.pool}


def plan_section(plan: Plan) -> bytes:
    """The section of a plan, which is read when a report asks for it."""
    writer = Writer()
    return _json({**write_plan(writer, plan), "pool": writer.pool})


def computed_section(program: Program) -> bytes:
    """The section of values that a program computes from its plan."""
    writer = Writer()
    data = [writer.of(_plain(getattr(program, name))) for name in _COMPUTED]
    return _json({"program": data, "pool": writer.pool})


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _bytes_of(constant: torch.Tensor, index: int) -> bytes:
    if constant.layout is not torch.strided or constant.is_meta or constant.is_quantized:
        raise ProgramFileError(
            f"The function captured closure constant {index}, a {constant.layout} tensor on"
            f" {constant.device}, which cannot be saved. Pass it as an argument."
        )
    flat = constant.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def load(
    path: str | Path, mesh_of: Callable[..., Mesh], trust_code: bool = False
) -> tuple["LoadedProgram", Signature]:
    """The program of a file, and the signature of its calls; nothing is traced or planned.

    Args:
        mesh_of: gives the mesh to run on, from the shape, axis names and device type of the mesh
            that the program was made for.
        trust_code: run the compiled code of the file.

    Raises:
        ProgramFileError: a file that is damaged, not this user's own, or of other versions.
        MeshError: a mesh that is not the program's.
    """
    container = read_file(Path(path).resolve())
    _check_versions(container)
    with decoding(container):
        program, signature = _loaded(container, mesh_of)
    program.trusts_code = trust_code
    return program, signature


@contextmanager
def decoding(container: Container) -> Iterator[None]:
    """Raise the error of a damaged file for data inside the block that no `Writer` made."""
    try:
        yield
    except FtpError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise damaged(container.name) from e


def _check_versions(container: Container) -> None:
    made = {name: container.header.get(name) for name in versions()}
    if made != versions():
        was = ", ".join(f"{name} {version}" for name, version in made.items())
        now = ", ".join(f"{name} {version}" for name, version in versions().items())
        raise ProgramFileError(
            f"{container.name} was saved with {was}; this is {now}. Save the program again with"
            " these versions."
        )


def _loaded(
    container: Container, mesh_of: Callable[..., Mesh]
) -> tuple["LoadedProgram", Signature]:
    shape, names, device_type, ascending = container.header["mesh"]
    mesh = mesh_of(tuple(shape), tuple(names), device_type)
    own = (mesh.shape, mesh.axis_names, mesh.device_type)
    if own != (tuple(shape), tuple(names), device_type):
        axes = " × ".join(f"{name} {n}" for name, n in zip(names, shape, strict=True))
        raise MeshError(
            f"{container.name} holds a program for a mesh of {axes} on {device_type}; this mesh"
            f" is {mesh}. Load it on such a mesh, or save the program for this one."
        )
    if ascending and not mesh.is_ascending:
        raise MeshError(
            f"{container.name} holds a program for a mesh whose ranks are in ascending order; those"
            f" of {mesh} are {list(mesh.ranks)[:8]}. Save the program for this mesh."
        )
    content = container.json("call")
    reader = Reader(content["pool"], None)
    given = [reader.of(x) for x in content["signature"]]
    signature = Signature(**dict(zip(_OF_SIGNATURE, given, strict=True)))
    known: dict[str, Any] = dict(zip(_GIVEN, map(reader.of, content["program"]), strict=False))
    constants = [
        _constant(container, i, reader.of(dtype), shape)
        for i, (dtype, shape) in enumerate(content["constants"])
    ]
    program = LoadedProgram(container, mesh, known, constants)
    # Read this process' graph now, so that a rank that cannot raises before the first call.
    for coordinate in mesh.coordinates() if mesh.kind == "simulated" else (None,):
        program.local(coordinate)
    return program, signature


_UNTRUSTED = (
    "load_program was not given trust_code=True. Code can do all that this user can: give it if you"
    " trust where the file comes from"
)


class LoadedProgram(Program):
    """The program of a file on this process' mesh. Parts that only reports need are read when asked
    for.
    """

    trusts_code = False

    def __init__(
        self,
        container: Container,
        mesh: Mesh,
        facts: Mapping[str, Any],
        constants: Sequence[torch.Tensor],
    ):
        """``facts``: the attributes that are not computed from a plan."""
        self.mesh, self.constants = mesh, tuple(constants)
        self._container, self._content = container, container.json("call")
        reader = Reader(self._content["pool"], None)
        data = self._content["program"][-len(_COMPUTED) :]
        self._known = dict(zip(_COMPUTED, map(reader.of, data), strict=True))
        for name, value in facts.items():
            setattr(self, name, value)

    @property
    def header(self) -> dict[str, Any]:
        """The file's header."""
        return dict(self._container.header)

    @property
    def sections(self) -> dict[str, bytes]:
        """The file's sections, without its compiled code."""
        names = [name for name in self._container.sections if name not in (_FACTS, _CODE)]
        return {name: self._container.section(name) for name in names}

    @cached_property
    def saved_code(self) -> SavedCode:
        container = self._container
        if _CODE not in container.sections:
            return NO_CODE
        with decoding(container):
            found = self._read_code() if self.trusts_code else _UNTRUSTED
        if isinstance(found, SavedCode):
            return found
        warnings.warn(
            f"The compiled code in {container.name} is not used, and the program is compiled here:"
            f" {found}.",
            CodeWarning,
            stacklevel=2,
        )
        return NO_CODE

    def _read_code(self) -> SavedCode | str:
        """The file's code; why it cannot run here."""
        facts = CodeFacts(**self._container.json(_FACTS))
        return facts.lacking() or ready(facts, self._container.section(_CODE))

    # Values that a planned program computes from its plan.

    @property
    def out_specs(self) -> list[PartitionSpec]:
        return list(self._known["out_specs"])

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        return list(self._known["out_shapes"])

    @property
    def fingerprint(self) -> str:
        return self._known["fingerprint"]

    @property
    def trial_rules(self) -> str:
        return self._known["trial_rules"]

    @property
    def renewed(self) -> tuple[tuple[int, str], ...]:
        return self._known["renewed"]

    def resolve_tree(self, given: optree.PyTreeSpec) -> None:
        """Build the structure of the result from that of the arguments."""
        self.out_tree = read_tree(self._content["tree"], given)

    @cached_property
    def out_tree(self) -> optree.PyTreeSpec:
        raise ReportError(
            "The structure of a loaded program's result is that of its arguments: call it once"
            " first."
        )

    @cached_property
    @collection_paused()
    def plan(self) -> Plan:
        with decoding(self._container):
            data = self._container.json("plan")
            return read_plan(Reader(data["pool"], None), data)

    @cached_property
    @collection_paused()
    def traced(self) -> fx.GraphModule:
        with decoding(self._container):
            data = self._container.json("traced")
            return read_traced(Reader(data["pool"], None), data)

    def with_options(self, **changes: Any) -> Program:
        raise ReportError(
            f"A saved program runs with the options that it was saved with;"
            f" {', '.join(changes)} would make another one. Lower the function again."
        )

    def local(self, coordinate: Mapping[str, int] | None = None) -> LocalProgram:
        """The rank's program; the first rank's where there are no processes."""
        number = self._number(coordinate)
        if number < 0:
            raise ReportError("The graph of another rank was not saved here. Lower the function.")
        if number not in self._locals:
            self._locals[number] = self._read_local(self._ranks["programs"][number])
        return self._locals[number]

    def holds(self, coordinate: Mapping[str, int] | None) -> bool:
        """Whether the file has a rank's graph."""
        return self._number(coordinate) >= 0

    def _number(self, coordinate: Mapping[str, int] | None) -> int:
        coordinate = self.own_coordinate if coordinate is None else coordinate
        at = 0
        for axis, n in self.mesh.axes.items():
            at = at * n + coordinate[axis]
        return self._ranks["of_rank"][at]

    def alike(self) -> list[list[list[int]]]:
        of_rank = np.array(self._ranks["of_rank"]).reshape(self.mesh.shape)
        return classes(self.mesh.axes, [of_rank])

    @collection_paused()
    def _read_local(self, data: Any) -> LocalProgram:
        reader = Reader(self._ranks["pool"], mesh_device(self.mesh))
        return read_local(reader, data, self.mesh.group_name)

    @cached_property
    @collection_paused()
    def _ranks(self) -> Any:
        return self._container.json("ranks")

    @cached_property
    def _locals(self) -> dict[int, LocalProgram]:
        return {}

    @property
    def partitioner(self) -> Any:
        """A saved program holds its ranks' graphs with all its options applied."""
        raise ReportError("A saved program is not partitioned again. Lower the function again.")


def _constant(
    container: Container, index: int, dtype: torch.dtype, shape: list[int]
) -> torch.Tensor:
    content = bytearray(container.section(f"constant {index}"))
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)
