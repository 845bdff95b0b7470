"""Check a spec against a tensor's shape and a mesh."""

from collections.abc import Sequence

from ftp.sharding.local_pieces import cut_length
from ftp.sharding.spec import PartitionSpec, Units


def check_spec(
    spec: PartitionSpec,
    shape: Sequence[int] | None,
    axes: dict[str, int],
    where: str,
    *,
    takes_sums: bool = False,
) -> list[str]:
    """Error messages about ``spec`` for a tensor of global ``shape``; empty if it fits.

    Args:
        shape: None if unknown.
        axes: the mesh, {name: size}.
        where: the tensor's name in messages, such as ``params['mlp']['up']``.
        takes_sums: whether the spec may have unreduced axes.
    """
    failures = []
    if spec.unreduced and not takes_sums:
        return [
            f"{where} has spec {spec}. A value that is not reduced yet may go into and come out of"
            " ftp.spmd, ftp.device_put, device_get and ftp.equivalent. Here give"
            f" {PartitionSpec(*spec.entries)}, and reduce the value first."
        ]
    if spec.entries[:1] == (...,):
        way_out = f" Give {spec.at_rank(len(shape))}." if shape is not None else ""
        return [f"{where} has spec {spec}, but only a constraint may begin with '...'.{way_out}"]
    for axis in (*spec.axes, *spec.unreduced):
        if axis not in axes:
            failures.append(
                f"{where} has spec {spec}, but the mesh has no axis {axis!r}; its axes are"
                f" {_sizes(axes)}."
            )
    if shape is not None and not failures and len(spec) <= len(shape):
        failures += _ragged(spec, shape, axes, where)
    if shape is not None and len(spec) > len(shape):
        failures.append(
            f"{where} has spec {spec} of {len(spec)} entries, but its shape {tuple(shape)} has"
            f" {len(shape)} dims."
            f" Give at most {len(shape)} {'entry' if len(shape) == 1 else 'entries'}."
        )
    return failures


def _ragged(
    spec: PartitionSpec, shape: Sequence[int], axes: dict[str, int], where: str
) -> list[str]:
    """Error messages about units and packs that do not fit their dim on some rank."""
    failures = []
    for dim in range(len(spec)):
        sizes = {shape[dim]}
        for cut in () if all(cut.is_plain for cut in spec.cuts(dim)) else spec.cuts(dim):
            if odd := [size for size in sizes if not cut.fits(size)]:
                held = (
                    ""
                    if odd == [shape[dim]]
                    else f", of which some ranks hold {max(odd)} before {cut.axis!r} cuts it"
                )
                failures.append(
                    f"{where} has spec {spec}:"
                    f" {_misfit(cut, f'dim {dim} of size {shape[dim]}{held}', max(odd))}."
                )
                break
            sizes = {
                cut_length(size, axes[cut.axis], i, cut)
                for size in sizes
                for i in range(axes[cut.axis])
            }
    return failures


def _misfit(cut: Units, dim: str, size: int) -> str:
    if isinstance(cut.pack, tuple) and sum(cut.pack) != size:
        return (
            f"packs of {' + '.join(map(str, cut.pack))} = {sum(cut.pack)} do not make up {dim}."
            " Give the size of each"
        )
    if isinstance(cut.pack, int) and size % cut.pack:
        return f"{cut.pack} equal packs do not make up {dim}. Give the size of each, as pack=(...)"
    packs = "" if cut.pack == 1 else f"the packs of {' + '.join(map(str, cut.sizes(size)))} along "
    return (
        f"units of {cut.size} do not divide {packs}{dim}. Pad"
        f" {'the dim' if cut.pack == 1 else 'them'}, or cut it by {cut.axis!r} alone"
    )


def _sizes(axes: dict[str, int]) -> str:
    return ", ".join(f"{name!r} (size {size})" for name, size in axes.items())
