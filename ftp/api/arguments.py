"""The arguments of a step's call: flattened and named, the key of their program, and checks."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import optree
import torch

from ftp.api.dynamic_shapes import DynamicDims
from ftp.errors import DonationError, InputError, raise_all
from ftp.sharding.arguments import Shape, padded_names
from ftp.sharding.dtensor_placements import check_plain, is_dtensor
from ftp.sharding.mesh import Mesh, mesh_device
from ftp.sharding.pytree import KeyOrders, key_of_static, kind_of, leaf_names
from ftp.sharding.sparse_matrix import flatten_entries
from ftp.sharding.spec import PartitionSpec
from ftp.sharding.torch_nodes import how_to_give
from ftp.tensors.placement import Placement, known_of, placement
from ftp.torch_internals.dispatch import dispatch_keys
from ftp.torch_internals.fake_tensors import FakeTensor
from ftp.torch_internals.functorch import is_functorch_wrapped_tensor
from ftp.tracing.settings import settings


class Arguments:
    """Positional arguments of a step, flat.

    Attributes:
        key: equal for calls that one program serves. It holds the tree with the settings of torch
            that a trace takes and the order of keys in dicts, the static leaves, and each tensor's
            shape, dtype and placement; of a tensor without a placement its dispatch keys (device,
            layout, wrappers).
        settings: those of torch that a trace takes.
        orders: of the keys in dicts.
    """

    def __init__(self, args: tuple[Any, ...], roots: Sequence[str] = ()):
        self.args, self.leaves, self.treedef = flatten_entries(args)
        self.roots = roots
        self.settings, self.orders = settings(), KeyOrders(args)
        tree = self.treedef, self.settings, self.orders.keys
        self.key = (tree, *map(_describe, self.leaves))

    def key_without(self, dims: DynamicDims) -> tuple[Any, ...]:
        """The key without the sizes of these dims."""
        described: list[Any] = list(self.key)
        for leaf, free in dims.items():
            shape, *rest = described[1 + leaf]
            known = rest[-1]
            if isinstance(known, Placement):
                rest[-1] = (known.mesh, known.spec, _without(known.shape, free))
            described[1 + leaf] = (_without(shape, free), *rest)
        return tuple(described)

    def key_without_sizes(self) -> tuple[Any, ...]:
        """The key with the number of its dims and its dtype for each tensor."""
        tensors = [isinstance(leaf, torch.Tensor) for leaf in self.leaves]
        described = zip(self.key[1:], tensors, strict=True)
        return (
            self.key[0],
            *((len(of[0]), of[1]) if is_tensor else of for of, is_tensor in described),
        )

    @cached_property
    def names(self) -> list[str]:
        named = zip(self.args, padded_names(self.roots, len(self.args)), strict=True)
        return [name for arg, root in named for name in leaf_names(arg, root)]

    @cached_property
    def positions(self) -> list[int]:
        """The position of each leaf's argument."""
        return [
            i for i, child in enumerate(self.treedef.children()) for _ in range(child.num_leaves)
        ]

    def is_like(
        self,
        key: tuple[Any, ...],
        shapes: Sequence[Shape | None],
        specs: Sequence[PartitionSpec],
        mesh: Mesh,
    ) -> bool:
        """Whether a program made for arguments of ``key`` and global ``shapes`` serves these, as
        far as this rank can tell.
        """
        head, *described = key
        return self.key[0] == head and all(
            _is_alike(
                leaf, of[0], of[1], None if known is None else placement(mesh, spec, known), mesh
            )
            for leaf, of, known, spec in zip(self.leaves, described, shapes, specs, strict=True)
        )


def _without(shape: Sequence[int], dims: Mapping[int, Any]) -> tuple[int | None, ...]:
    return tuple(None if d in dims else size for d, size in enumerate(shape))


def _is_alike(leaf: Any, shape: Any, dtype: Any, due: Placement | None, mesh: Mesh) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return _describe(leaf) == (shape, dtype)
    if leaf.shape != shape or leaf.dtype != dtype or known_of(leaf) not in (None, due):
        return False
    return (
        leaf.layout is torch.strided
        and leaf.device.type == mesh.device_type
        and not (_is_traced(leaf) or is_dtensor(leaf))
    )


def is_other_tensor(now: tuple[Any, ...], then: tuple[Any, ...]) -> bool:
    """Whether the tensors of two keys differ in shape, dtype or placement, if both have one."""
    are_placed = isinstance(now[-1], Placement) and isinstance(then[-1], Placement)
    return now != then if are_placed else now[:2] != then[:2]


def _describe(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, torch.Tensor):
        # A placement implies the dispatch keys, which take longer to read than all the rest.
        known = known_of(leaf)
        last = dispatch_keys(leaf).raw_repr() if known is None else known
        return leaf.shape, leaf.dtype, last
    return key_of_static(leaf)


def _is_traced(leaf: torch.Tensor) -> bool:
    return isinstance(leaf, FakeTensor) or is_functorch_wrapped_tensor(leaf)


def check_static(call: Arguments) -> None:
    """Raises for leaves that are neither plain tensors nor hashable static values."""
    check_plain(call.leaves, call.names)
    failures = []
    for leaf, name in zip(call.leaves, call.names, strict=True):
        if isinstance(leaf, np.ndarray):
            failures.append(
                f"{name} is a numpy array of shape {leaf.shape}. Give a tensor:"
                " torch.from_numpy(array)."
            )
        elif not _is_hashable(leaf):
            failures.append(
                f"{name} is {kind_of(leaf)}: neither a tensor, nor a container that optree knows,"
                f" nor a hashable static value. {how_to_give(leaf)}"
            )
    raise_all(InputError, failures)


def nones(call: Arguments) -> list[str]:
    """The names of all None among the arguments."""
    found = []
    for arg, root in zip(call.args, padded_names(call.roots, len(call.args)), strict=True):
        accessors = optree.tree_accessors(arg, none_is_leaf=True, namespace="ftp")
        leaves = optree.tree_leaves(arg, none_is_leaf=True, namespace="ftp")
        nones = (at for at, leaf in zip(accessors, leaves, strict=True) if leaf is None)
        found += [accessor.codify(root) for accessor in nones]
    return found


def check_values(call: Arguments, mesh: Mesh) -> None:
    """Raises for tensors without values, and for those on other devices than the mesh's."""
    check_plain(call.leaves, call.names)
    failures = []
    for leaf, name in zip(call.leaves, call.names, strict=True):
        if not isinstance(leaf, torch.Tensor):
            continue
        if _is_traced(leaf):
            failures.append(
                f"{name} belongs to a trace or a transform of torch.func, and has no values. A step"
                " takes plain tensors; inside another function call the function itself, not its"
                " step."
            )
        elif leaf.device.type == "meta":
            failures.append(
                f"{name} is on the meta device and has no values. step.lower takes it; to run the"
                " step, load real ones."
            )
        elif leaf.device.type != mesh.device_type:
            failures.append(
                f"{name} is on {leaf.device}, the mesh on {mesh.device_type}."
                f" Move it with .to({mesh.device_type!r}), or place it with ftp.device_put."
            )
        elif (
            mesh.kind == "process"
            and leaf.device.type != "cpu"
            and leaf.device != (here := mesh_device(mesh))
        ):
            failures.append(
                f"{name} is on {leaf.device}, but this process computes on {here}. Place it with"
                " ftp.device_put."
            )
    raise_all(InputError, failures)


def check_donated_once(call: Arguments, donate: Sequence[int]) -> None:
    """Raises for a donated tensor that shares memory with another leaf: a program would write to
    one while it still reads the other.
    """
    if beyond := [position for position in donate if not 0 <= position < len(call.args)]:
        raise DonationError(
            f"donate names argument {beyond[0]}, but the step is called with {len(call.args)}"
            " arguments, counted from 0."
        )
    tensors = {i: leaf for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)}
    first: dict[int, int] = {}
    pairs = [(j, i) for i, leaf in tensors.items() if (j := first.setdefault(id(leaf), i)) != i]
    for j, i in pairs or _sharing(tensors):
        a, b = call.leaves[j], call.leaves[i]
        # Inputs that are not dense are copied before they are written to.
        if any(
            call.positions[at] in donate and (a is b or x.is_contiguous())
            for at, x in ((j, a), (i, b))
        ):
            raise DonationError(
                f"{call.names[j]} and {call.names[i]}"
                f" {'are the same tensor' if a is b else 'share memory'}. It is donated, and its"
                " memory would be reused twice. Clone one of them."
            )


def check_captured_kept(
    call: Arguments, donated: Sequence[int], captured: Sequence[torch.Tensor]
) -> None:
    """Raises for a donated leaf that shares memory with a tensor that the function captures and the
    program reads at each call.
    """
    n = len(call.leaves)
    tensors = {i: call.leaves[i] for i in donated} | {n + k: x for k, x in enumerate(captured)}
    failures = [
        f"{call.names[i]} shares memory with a tensor of shape {tuple(tensors[j].shape)} that the"
        " function captures. It is donated, and the program reads the other at each call. Clone one"
        " of them."
        for i, j in _sharing(tensors)
        if i < n <= j and tensors[i].is_contiguous()
    ]
    raise_all(DonationError, failures)


def _sharing(tensors: Mapping[int, torch.Tensor]) -> list[tuple[int, int]]:
    """Pairs of tensors whose memory, from the first to the last element, overlaps."""
    real = {
        i: x
        for i, x in tensors.items()
        if type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and not (x.is_meta or is_functorch_wrapped_tensor(x))
        and x.numel()
    }
    if len({x.untyped_storage().data_ptr() for x in real.values()}) == len(real):
        return []
    begin = {i: x.data_ptr() for i, x in real.items()}
    found: list[tuple[int, int]] = []
    open_: dict[int, int] = {}  # by tensor, the end of its memory
    for i in sorted(real, key=begin.__getitem__):
        x = real[i]
        open_ = {j: end for j, end in open_.items() if end > begin[i]}
        found += [(min(i, j), max(i, j)) for j in open_]
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        open_[i] = begin[i] + (last + 1) * x.element_size()
    return sorted(found)


def describe_keywords(
    fn: Callable[..., Any], arguments: Sequence[str], n: int, keywords: Mapping[str, Any]
) -> str:
    """The error message for keyword arguments given after ``n`` positional ones.

    Args:
        arguments: names of the positional arguments.
    """
    positional = padded_names(arguments, n)
    if strange := [name for name in keywords if name not in arguments[n:]]:
        name, listed = getattr(fn, "__name__", kind_of(fn)), ", ".join(arguments)
        if strange[0] in _takes_by_name(fn):
            return (
                f"The step takes no keyword {strange[0]!r}, though {name} does: its arguments"
                f" are positional, ({listed}). Make the step of functools.partial({name},"
                f" {strange[0]}=...)."
            )
        again = f", and {strange[0]!r} was given already" if strange[0] in positional else ""
        return (
            f"The step takes no argument {strange[0]!r}: {name} takes ({listed}), by"
            f" position{again}. Call step({listed})."
        )
    given = ", ".join([*positional, *sorted(keywords, key=arguments.index)])
    return (
        f"The step does not take the keyword {next(iter(keywords))!r}; its arguments are"
        f" positional. Call step({given})."
    )


def _takes_by_name(fn: Callable[..., Any]) -> list[str]:
    """The keyword-only arguments of a function."""
    try:
        return [
            p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY
        ]
    except (TypeError, ValueError):
        return []


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True
