"""Factors of tensors' dims in common patterns, for rules that depend on the call."""

from collections.abc import Sequence

from ftp.rules.call import Call
from ftp.rules.notation import Dims, Notation
from ftp.rules.overloads import aten
from ftp.rules.rule import LocalHook, Rule

OF_NO_DIMS = (aten.all.dims, aten.any.dims)  # that reduce nothing, given an empty list of dims


def numbered(ndim: int) -> Dims:
    """A factor for each of ``ndim`` dims: ``~0``, ``~1``, ..."""
    return tuple((f"~{d}",) for d in range(ndim))


def factors(*tensors: Dims) -> frozenset[str]:
    """The factors of some tensors' dims."""
    return frozenset(f for dims in tensors for dim in dims for f in dim)


def broadcast_notation(
    operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> Notation:
    """The factors of tensors that broadcast together from the right: one per dim, none for a dim of
    size one that is expanded.
    """
    ndim = max((len(s) for s in (*operands, *results)), default=0)
    sizes = [
        max(
            (
                s[len(s) - ndim + d]
                for s in (*operands, *results)
                if len(s) - ndim + d >= 0 and s[len(s) - ndim + d] != 1
            ),
            default=1,
        )
        for d in range(ndim)
    ]

    def dims(shape: tuple[int, ...]) -> Dims:
        skip = ndim - len(shape)
        return tuple(
            (f"~{skip + d}",) if size == sizes[skip + d] or size != 1 else ()
            for d, size in enumerate(shape)
        )

    return Notation(
        tuple(map(dims, operands)), tuple(map(dims, results)), frozenset(), ((),) * len(results)
    )


def reduced(
    call: Call, op: str | None, linear: Sequence[Sequence[int]] = (), local: LocalHook | None = None
) -> Rule:
    """The rule of a reduction over the argument ``dim``, over all dims without one."""
    (x, *_) = call.operands
    names = {a.name for a in call.target._schema.arguments}
    dim = call.arg("dim") if "dim" in names else None
    keepdim = call.results[0].ndim == x.ndim
    gone = (
        set()
        if dim == [] and call.target in OF_NO_DIMS
        else set(range(x.ndim))
        if dim is None or dim == []
        else {d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)}
    )
    operand = tuple((f"~{d}",) for d in range(x.ndim))
    result = tuple(
        () if d in gone else f for d, f in enumerate(operand) if keepdim or d not in gone
    )
    factors = [f"~{d}" for d in sorted(gone) if d < x.ndim]
    whole = frozenset(factors) if op is None else frozenset()
    pending = () if op is None else tuple((f, op) for f in factors)
    n = len(call.results)
    return Rule(
        Notation((operand,), (result,) * n, whole, (pending,) * n), tuple(map(tuple, linear)), local
    )


def acting_on(
    call: Call,
    dims: Sequence[int],
    linear: Sequence[Sequence[int]] = (),
    local: LocalHook | None = None,
) -> Rule:
    """The rule of an op on tensors of equal ndim that acts along ``dims``, in which the tensors may
    differ in size; the other dims correspond.
    """
    metas = (*call.operands, *call.results)
    ndim = metas[0].ndim
    at = {d % max(ndim, 1) for d in dims}
    whole = set()

    def name(t: int, d: int) -> tuple[str, ...]:
        if d not in at:
            return (f"~{d}",)
        factor = f"d{d}" if len({m.shape[d] for m in metas}) == 1 else f"d{d}_{t}"
        whole.add(factor)
        return (factor,)

    named = [tuple(name(t, d) for d in range(m.ndim)) for t, m in enumerate(metas)]
    n = len(call.operands)
    notation = Notation(
        tuple(named[:n]), tuple(named[n:]), frozenset(whole), ((),) * len(call.results)
    )
    return Rule(notation, tuple(map(tuple, linear)), local)


def core_dims(
    call: Call, batch: int, linear: Sequence[Sequence[int]] = (), local: LocalHook | None = None
) -> Rule:
    """The rule of an op whose tensors share their first ``batch`` dims; the others are whole and
    each tensor's own.
    """
    metas = (*call.operands, *call.results)
    named = [
        tuple((f"~{d}",) if d < batch else (f"y{t}_{d}",) for d in range(m.ndim))
        for t, m in enumerate(metas)
    ]
    whole = frozenset(f for dims in named for (f,) in dims[batch:])
    n = len(call.operands)
    return Rule(
        Notation(tuple(named[:n]), tuple(named[n:]), whole, ((),) * len(call.results)),
        tuple(map(tuple, linear)),
        local,
    )


def all_whole(call: Call, linear: Sequence[Sequence[int]] = ()) -> Rule:
    """The rule of an op that keeps all dims whole."""
    return core_dims(call, 0, linear)
