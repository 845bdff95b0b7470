"""Values computed from captured tensors alone, such as entries of a constant table: Python numbers
while tracing. A step refuses later calls if such a tensor changes (`ftp.tracing.captured`).
"""

from typing import Any

import torch
from torch import fx

from ftp.tracing.data_dependent.known_values import KnownValues
from ftp.tracing.recorder import Recorder


class CapturedValues(KnownValues):
    """As `KnownValues`, and of captured tensors, each of which the recorder notes as read."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def is_given(self, node: fx.Node) -> bool:
        return super().is_given(node) or self.captured(node) is not None

    def given(self, node: fx.Node) -> Any:
        tensor = self.captured(node)
        if tensor is None:
            return super().given(node)
        self._recorder.note_read(tensor)
        return tensor.detach().cpu()

    def captured(self, node: fx.Node) -> torch.Tensor | None:
        """The captured tensor that a node stands for."""
        number = node.meta.get("ftp_constant")
        return None if number is None else self._recorder.with_values.get(number)
