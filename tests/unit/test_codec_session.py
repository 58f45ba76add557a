"""A block being coded: what lasts from step to step stays where it is, as a recorded step needs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from codec_models import integer, mixed
from mulstm.codec.network import Network
from mulstm.codec.session import Session
from mulstm.data.alphabet import Alphabet

LETTERS = Alphabet(b" abcdefghijklmnopqrstuvwxyz")


def tensors(thing: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(thing).items() if isinstance(value, torch.Tensor)}


def places(session: Session) -> dict[str, int]:
    """Where everything lies that the next step reads."""
    parts = {"session": session, "learner": session._learner, "matcher": session._matcher}
    parts |= {f"state {k}": state for k, state in enumerate(session._state)}
    return {
        f"{part}.{name}": tensor.data_ptr()
        for part, thing in parts.items()
        if thing is not None
        for name, tensor in tensors(thing).items()
    }


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
def test_nothing_that_lasts_moves(adaptive: bool, compiled: bool) -> None:
    network, B, T = Network(integer(LETTERS, layers=2), compiled=compiled), 5, 12
    text = np.frombuffer(mixed(B * T), dtype=np.uint8).reshape(T, B)
    with torch.inference_mode():
        session = Session(network, B * T, B, adaptive)
        before, seen = places(session), [session.tables().clone()]
        assert len(before) == (27 if adaptive else 9)
        for row in text:
            symbols = session.spelling.symbol_of[row]
            entries = torch.from_numpy(np.where(symbols < 0, session.entries, symbols))
            session.feed(entries, torch.from_numpy(row.copy()))
            assert places(session) == before
            seen.append(session.tables().clone())
    assert not torch.equal(seen[0], seen[5])


def test_the_last_lane_leaves() -> None:
    network = Network(integer(LETTERS))
    with torch.inference_mode():
        session = Session(network, 17, 4, True)  # lanes of 5, 5, 5 and 2 bytes
        for t in range(5):
            k = len(session.tables())
            assert k == session.taking_part == (4 if t < 2 else 3)
            session.feed(torch.zeros(k, dtype=torch.int64), torch.zeros(k, dtype=torch.uint8))
