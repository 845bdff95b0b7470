"""Record torch's collectives, in-place and functional ones, as exchanges of tensors between the
ranks of a group.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ftp.equivalence.recorded_axis import AXIS
from ftp.equivalence.recorded_call import IssuedBy, RecordedCall
from ftp.equivalence.recorder import ProgramRecorder
from ftp.errors import TraceError
from ftp.source import user_line

_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
}


class ExchangeRecorder:
    """Records the collectives of one rank."""

    def __init__(self, mesh: DeviceMesh):
        self.issued = IssuedBy(mesh)
        self.uses_axis = False

    def handles(self, func: Any) -> bool:
        return func.namespace in ("c10d", "_c10d_functional") or func in AXIS

    def record(
        self, recorder: ProgramRecorder, func: Any, args: Any, kwargs: Mapping[str, Any], line: str
    ) -> Any:
        call = RecordedCall(self.issued, recorder, line)
        if func in AXIS:
            self.uses_axis = True
            with recorder:
                return AXIS[func](call, *args, **kwargs)
        name = func._schema.name.split("::")[1]
        known = _IN_PLACE if func.namespace == "c10d" else _FUNCTIONAL
        if name not in known:
            raise TraceError(
                f"{user_line()}\n  {func} has no meaning that is known to ftp.equivalent. Known"
                f" are {', '.join(sorted(known))}."
            )
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        with recorder:
            return known[name](call, {**given, **kwargs})


def _flat(x: Tensor, n: int) -> list[Tensor]:
    if not x.numel():
        return [x] * n
    return list(x.view(-1).chunk(n)) if x.is_contiguous() else list(x.reshape(-1).chunk(n))


def _rows(x: Tensor, sizes: Sequence[int], n: int) -> list[Tensor]:
    return list(x.split(list(sizes) if sizes else [x.shape[0] // n] * n))


# torch.distributed's in-place collectives: `given` are the op's arguments by name.

_IN_PLACE: dict[str, Callable[[RecordedCall, Mapping[str, Any]], Any]] = {}
_FUNCTIONAL: dict[str, Callable[[RecordedCall, Mapping[str, Any]], Any]] = {}


def _in_place(*names: str):
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def run(call: RecordedCall, given: Mapping[str, Any]) -> Any:
            ranks, group = call.of.group(given["process_group"])
            kind, sent, into, option, sizes, result = fn(given, len(ranks), ranks, call)
            number = call.issue(kind, sent, into, ranks, group, option, sizes)
            work = call.work(number)
            return work if result is None else (result, work)

        _IN_PLACE.update(dict.fromkeys(names, run))
        return run

    return register


def _reduction(given: Mapping[str, Any]) -> str:
    op: Any = given["reduce_op"]
    op = op if isinstance(op, dist.ReduceOp.RedOpType) else op.op()
    for known, name in _REDUCTIONS.items():
        if op == known or int(op) == int(known):  # type: ignore[arg-type]
            return name
    raise TraceError(f"{user_line()}\n  The reduction {op} is not known to ftp.equivalent.")


@_in_place("allreduce_", "allreduce_coalesced_")
def _all_reduce(given: Any, n: int, ranks: Any, call: Any) -> Any:
    xs = given["tensors"]
    result = None if "sparse_indices" not in given else xs
    return "all_reduce", xs, xs, _reduction(given), (), result


@_in_place("broadcast_")
def _broadcast(given: Any, n: int, ranks: Any, call: Any) -> Any:
    xs = given["tensors"]
    return "broadcast", xs, xs, "", (given["root_rank"],), xs


@_in_place("reduce_")
def _reduce(given: Any, n: int, ranks: Any, call: Any) -> Any:
    xs = given["tensors"]
    return "reduce", xs, xs, _reduction(given), (given["root_rank"],), None


@_in_place("_allgather_base_")
def _all_gather_base(given: Any, n: int, ranks: Any, call: Any) -> Any:
    out = given["output_tensor"]
    return "all_gather", [given["input_tensor"]], _flat(out, n), "", (), out


@_in_place("allgather_")
def _all_gather(given: Any, n: int, ranks: Any, call: Any) -> Any:
    out = given["output_tensors"]
    return "all_gather", given["input_tensors"], out[0], "", (), out


@_in_place("allgather_into_tensor_coalesced_")
def _all_gather_coalesced(given: Any, n: int, ranks: Any, call: Any) -> Any:
    into = [part for x in given["outputs"] for part in _flat(x, n)]
    return "all_gather", given["inputs"], into, "", (), None


@_in_place("_reduce_scatter_base_")
def _reduce_scatter_base(given: Any, n: int, ranks: Any, call: Any) -> Any:
    out = given["output_tensor"]
    sent = _flat(given["input_tensor"], n)
    return "reduce_scatter", sent, [out], _reduction(given), (), out


@_in_place("reduce_scatter_")
def _reduce_scatter(given: Any, n: int, ranks: Any, call: Any) -> Any:
    out = given["output_tensors"]
    return "reduce_scatter", given["input_tensors"][0], out, _reduction(given), (), out


@_in_place("reduce_scatter_tensor_coalesced_")
def _reduce_scatter_coalesced(given: Any, n: int, ranks: Any, call: Any) -> Any:
    sent = [part for x in given["inputs"] for part in _flat(x, n)]
    return "reduce_scatter", sent, given["outputs"], _reduction(given), (), None


@_in_place("alltoall_base_")
def _all_to_all_base(given: Any, n: int, ranks: Any, call: Any) -> Any:
    sent = _rows(given["input"], given["input_split_sizes"], n)
    into = _rows(given["output"], given["output_split_sizes"], n)
    return "all_to_all", sent, into, "", (), None


@_in_place("alltoall_")
def _all_to_all(given: Any, n: int, ranks: Any, call: Any) -> Any:
    out = given["output_tensors"]
    return "all_to_all", given["input_tensors"], out, "", (), out


@_in_place("gather_")
def _gather(given: Any, n: int, ranks: Any, call: Any) -> Any:
    out, root = given["output_tensors"], given["root_rank"]
    into = out[0] if ranks[root] == call.of.rank else []
    return "gather", given["input_tensors"], into, "", (root,), None


@_in_place("scatter_")
def _scatter(given: Any, n: int, ranks: Any, call: Any) -> Any:
    out, root = given["output_tensors"], given["root_rank"]
    sent = given["input_tensors"][0] if ranks[root] == call.of.rank else []
    return "scatter", sent, out, "", (root,), out


@_in_place("barrier")
def _barrier(given: Any, n: int, ranks: Any, call: Any) -> Any:
    return "barrier", [], [], "", (), None


@_in_place("send")
def _send(given: Any, n: int, ranks: Any, call: Any) -> Any:
    return "send", given["tensors"], [], str(given["tag"]), (ranks[given["dst"]],), None


@_in_place("recv_")
def _recv(given: Any, n: int, ranks: Any, call: Any) -> Any:
    return "recv", [], given["tensors"], str(given["tag"]), (ranks[given["src"]],), None


# Functional collectives.


def _functional_op(*names: str):
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def run(call: RecordedCall, given: Mapping[str, Any]) -> Any:
            ranks, group = call.of.group(given["group_name"])
            kind, sent, into, option, sizes, result = fn(given, len(ranks), call)
            call.issue(kind, sent, into, ranks, group, option, sizes)
            return result

        _FUNCTIONAL.update(dict.fromkeys(names, run))
        return run

    return register


@_functional_op("all_reduce_")
def _f_all_reduce_in_place(given: Any, n: int, call: Any) -> Any:
    x = given["input"]
    return "all_reduce", [x], [x], given["reduce_op"].lower(), (), x


@_functional_op("broadcast_")
def _f_broadcast_in_place(given: Any, n: int, call: Any) -> Any:
    x = given["input"]
    return "broadcast", [x], [x], "", (given["src"],), x


@_functional_op("all_reduce")
def _f_all_reduce(given: Any, n: int, call: Any) -> Any:
    x = given["input"]
    out = call.fresh(x)
    return "all_reduce", [x], [out], given["reduce_op"].lower(), (), out


@_functional_op("all_gather_into_tensor")
def _f_all_gather(given: Any, n: int, call: Any) -> Any:
    x = given["input"]
    out = call.fresh(x, (n * x.shape[0], *x.shape[1:]))
    return "all_gather", [x], _flat(out, n), "", (), out


@_functional_op("reduce_scatter_tensor")
def _f_reduce_scatter(given: Any, n: int, call: Any) -> Any:
    x = given["input"]
    out = call.fresh(x, (x.shape[0] // n, *x.shape[1:]))
    sent = _flat(x.contiguous(), n)
    return "reduce_scatter", sent, [out], given["reduce_op"].lower(), (), out


@_functional_op("all_to_all_single")
def _f_all_to_all(given: Any, n: int, call: Any) -> Any:
    x, received = given["input"], [int(s) for s in given["output_split_sizes"]]
    sizes = [int(s) for s in given["input_split_sizes"]]
    out = call.fresh(x, (sum(received) if received else x.shape[0], *x.shape[1:]))
    return "all_to_all", _rows(x, sizes, n), _rows(out, received, n), "", (), out


@_functional_op("broadcast")
def _f_broadcast(given: Any, n: int, call: Any) -> Any:
    x = given["input"]
    out = call.fresh(x)
    return "broadcast", [x], [out], "", (given["src"],), out


def _f_coalesced(name: str, single: Callable[..., Any]) -> None:
    """Functional collectives of several tensors: one after another."""

    def run(call: RecordedCall, given: Mapping[str, Any]) -> Any:
        rest = {k: v for k, v in given.items() if k != "inputs"}
        return [single(call, {**rest, "input": x}) for x in given["inputs"]]

    _FUNCTIONAL[name] = run


_f_coalesced("all_reduce_coalesced", _f_all_reduce)
_f_coalesced("all_gather_into_tensor_coalesced", _f_all_gather)
_f_coalesced("reduce_scatter_tensor_coalesced", _f_reduce_scatter)


def _wait_tensor(call: RecordedCall, given: Mapping[str, Any]) -> Any:
    x = given["tensor"]
    number = call.of.last.get(x.untyped_storage()._cdata)
    if number is not None:
        call.wait(number)
    return x


_FUNCTIONAL["wait_tensor"] = _wait_tensor
