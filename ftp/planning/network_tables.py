"""A cost network as numbers."""

from typing import NamedTuple

import numpy as np

from ftp.planning.graph import Node, Value
from ftp.planning.problem import BytePrices
from ftp.sharding.layout import Layout


class Tables(NamedTuple):
    """The cost network as numbers, and the variable of each node and value.

    Attributes:
        held, kept: per variable with a price of bytes, the bytes that a rank holds by value.
    """

    domains: list[int]
    unary: list[np.ndarray]
    pairs: dict[tuple[int, int], np.ndarray]
    held: dict[int, np.ndarray]
    kept: dict[int, np.ndarray]
    of_node: dict[Node, int]
    of_value: dict[Value, int]
    copies: dict[Value, list[tuple[Layout, ...]]]

    def at(
        self, prices: BytePrices
    ) -> tuple[list[int], list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
        """The network at prices of bytes."""
        unary = list(self.unary)
        for price, nbytes in ((prices.held, self.held), (prices.kept, self.kept)):
            for variable, of_values in nbytes.items() if price else ():
                unary[variable] = unary[variable] + price * of_values
        return self.domains, unary, self.pairs
