"""Which symbols a lane sees in a chunk: the input product is made once for each, not once a step."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mulstm.data.alphabet import Bytes

Places = NDArray[np.int32]
A = TypeVar("A")  # an array here, a tensor on a device
CLASSES = 16  # sizes that `room_for` gives
GAIN = 0.6  # of the places; beyond it the way there and back costs more than the products it saves


class Pairs(NamedTuple, Generic[A]):
    """The distinct pairs of lane and symbol in a chunk of B lanes x T steps, lane after lane; all int32.

    There may be rows for more pairs than there are: those have no places.
    """

    lane: A  # (P)
    symbol: A  # (P)
    pair: A  # (T * B): the pair at step t of lane b stands at t * B + b
    order: A  # (T * B): those places, pair after pair
    first: A  # (P + 1): where each pair's places begin in `order`


def pairs_of(x: Bytes) -> Pairs[Places]:
    """Of symbols (B, T)."""
    B, T = x.shape
    steps = np.argsort(x, axis=1, kind="stable")
    in_order = np.take_along_axis(x, steps, axis=1)
    new = np.ones((B, T), dtype=bool)
    new[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    lane, at = np.nonzero(new)
    order = (steps * B + np.arange(B)[:, None]).ravel().astype(np.int32)
    pair = np.empty(T * B, dtype=np.int32)
    pair[order] = np.cumsum(new.ravel()) - 1
    first = np.append(lane * T + at, B * T).astype(np.int32)
    return Pairs(lane.astype(np.int32), in_order[new].astype(np.int32), pair, order, first)


def room_for(pairs: Pairs[Places]) -> int:
    """A round number of rows that holds them, the same for most chunks of a text; 0: too many to gain by."""
    places = pairs.pair.shape[0]
    step = -(-places // (16 * CLASSES)) * 16
    rows = -(-pairs.lane.shape[0] // step) * step
    return rows if rows <= GAIN * places else 0
