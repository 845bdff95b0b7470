"""One recorded collective: its exchange of tensors as nodes of one rank's graph."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from ftp.equivalence.recorder import ProgramRecorder
from ftp.ops.exchange import ARRIVED, EXCHANGE
from ftp.source import user_line


class IssuedBy:
    """State that one rank's collectives share.

    Attributes:
        works: the handles that asynchronous calls returned.
        last: per storage, the number of the last exchange that sent or filled it.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh, self.rank = mesh, dist.get_rank()
        self.works: list[Any] = []
        self.last: dict[int, int] = {}
        self._groups: dict[str, str] = {}

    def group(self, given: Any) -> tuple[tuple[int, ...], str]:
        """The ranks of a process group and its name, the same on all of them."""
        if isinstance(given, str):
            given = c10d._resolve_process_group(given)  # type: ignore[arg-type]
        elif not isinstance(given, dist.ProcessGroup):
            given = dist.ProcessGroup.unbox(given)
        ranks = tuple(dist.get_process_group_ranks(given))
        alike = [n for n, of in self._groups.items() if of == repr(ranks)]
        self._groups.setdefault(given.group_name, repr(ranks))
        at = alike.index(given.group_name) if given.group_name in alike else len(alike)
        return ranks, str(at)


class RecordedCall:
    """One call of a collective, whose exchange is appended to the graph."""

    def __init__(self, of: IssuedBy, recorder: ProgramRecorder, line: str):
        self.of, self.recorder, self.line = of, recorder, line

    def issue(
        self,
        kind: str,
        sent: Sequence[Tensor],
        into: Sequence[Tensor],
        ranks: Sequence[int],
        group: str,
        option: str = "",
        sizes: Sequence[int] = (),
    ) -> int:
        r = self.recorder
        for x in into:
            r.refuse_write(x, kind)
        number = r.calls
        r.calls += 1
        nodes: list[list[fx.Node]] = [[r.node_of(x) for x in xs] for xs in (sent, into)]
        args = (kind, *nodes, list(ranks), group, option, list(sizes), number)
        node = r.graph.call_function(EXCHANGE, args)
        r._note(node, None, self.line)
        for x in (*into, *sent):
            self.of.last[x.untyped_storage()._cdata] = number
        return number

    def wait(self, number: int) -> None:
        node = self.recorder.graph.call_function(ARRIVED, (number,))
        ProgramRecorder._note(node, None, self.line)

    def work(self, number: int) -> Any:
        """A handle whose ``wait`` is recorded."""
        from ftp.torch_internals.process_groups import PythonCallbackWork

        def wait(*_: Any) -> bool:
            node = self.recorder.graph.call_function(ARRIVED, (number,))
            ProgramRecorder._note(node, None, user_line())
            return True

        made = PythonCallbackWork(wait)
        self.of.works.append(made)
        return made.boxed()

    def fresh(self, like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        return like.new_empty(tuple(like.shape if shape is None else shape))
