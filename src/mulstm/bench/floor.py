"""How many operations a contender's work takes, and the time below which an H200 cannot do it."""

from __future__ import annotations

from dataclasses import dataclass

from mulstm.recipe import MULTIPLICATIVE

# Measured on one H200: products, memory, cache; barrier of a whole grid.
PRODUCTS, MEMORY, CACHE, BARRIER = 790e12, 4.6e12, 8.9e12, 0.93e-6
FITS_CACHE = 50e6
ADAM = 48.0  # bytes that an update moves for each parameter: weights, gradient, both means, packed copies


@dataclass(frozen=True)
class Loop:
    """The recurrence of one layer: weights that every step reads, in so many dependent products."""

    weights: int
    products: int


@dataclass(frozen=True)
class Work:
    """What is multiplied for B lanes of T symbols."""

    B: int
    T: int
    loops: tuple[Loop, ...]
    other: int  # weights of the products over a whole chunk: input, layer below, output
    parameters: int = 0  # those that an optimiser moves
    backward: bool = True

    @property
    def flops(self) -> float:
        """Of the products: backward takes two for each one of forward."""
        weights = sum(loop.weights for loop in self.loops) + self.other
        return (6.0 if self.backward else 2.0) * self.B * self.T * weights

    @property
    def floor(self) -> float:
        """Seconds: the steps one after another, at the pace of products or of reading the weights."""
        seconds, inside = 0.0, 0.0
        directions = 2 if self.backward else 1
        for loop in self.loops:
            products = 2.0 * self.B * loop.weights / PRODUCTS
            size = 2.0 * loop.weights  # bytes in bf16
            reading = size / (CACHE if size <= FITS_CACHE else MEMORY)
            seconds += directions * self.T * (max(products, reading) + BARRIER * loop.products)
            inside += directions * self.T * products
        return seconds + self.flops / PRODUCTS - inside + ADAM * self.parameters / MEMORY


def recurrence(cell: str, H: int, blocks: int = 4) -> Loop:
    """Of one layer of a cell."""
    return Loop((blocks + 1) * H * H, 2) if cell in MULTIPLICATIVE else Loop(blocks * H * H, 1)


def layer(cell: str, H: int, E: int, B: int, T: int) -> Work:
    """One layer with its input product, forward and backward."""
    rows = 5 * H if cell == "mlstm" else 4 * H
    return Work(B, T, (recurrence(cell, H),), rows * E)
