"""The ops that run."""

from torch.utils._python_dispatch import TorchDispatchMode


class SeenOps(TorchDispatchMode):
    """Notes the name of each op that runs inside, such as ``aten.mul.Tensor``."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.add(str(func))
        return func(*args, **(kwargs or {}))
