"""Data movement on element maps is torch's on the tensors."""

import numpy as np
import pytest

from ftp.certification.data_movement import sliced
from ftp.certification.element_map import MeshAxis, element_map
from ftp.certification.expected_parts import ExpectedParts
from ftp.certification.unsound import Unsound


def test_a_rank_s_start_below_zero_counts_from_the_end():
    whole = ExpectedParts({"cp": MeshAxis("cp", 0, 2)}, ()).whole(4)
    x = element_map("x", [whole])
    assert sliced(x, 0, np.array([-1, -1]), np.array([4, 4])).shape == (1,)
    with pytest.raises(Unsound, match="different sizes"):  # none, and two
        sliced(x, 0, np.array([-1, 2]), np.array([2, 4]))
