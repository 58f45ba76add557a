"""Scoring a chunk as one CUDA graph: with few lanes the launches, not the arithmetic, would take the time."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mulstm.nn.model import LanguageModel
from mulstm.ops.graphs import recorded


class Scorer:
    """Feeds chunks to a model one after another; it keeps the state. On a CPU each call runs as it stands."""

    def __init__(self, model: LanguageModel, lanes: int) -> None:
        self.model = model
        self.state = model.zero_state(lanes)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Nats of each symbol y (B, T) after x; 0 where y is negative. The next call may overwrite it."""
        nats, after = self.model.losses(x, y, self.state)
        for kept, new in zip(self.state, after, strict=True):
            kept.h.copy_(new.h)
            kept.c.copy_(new.c)
        return nats


class ReplayedScorer(Scorer):
    """The same with chunks of one length captured; others run as they stand."""

    def __init__(self, model: LanguageModel, lanes: int, chunk: int) -> None:
        super().__init__(model, lanes)
        device = self.state[0].h.device
        self.x = torch.zeros(lanes, chunk, dtype=torch.long, device=device)
        self.y = torch.full_like(self.x, -1)
        score = partial(super().__call__, self.x, self.y)
        self.graph, self.nats = recorded(device, score, before=score)
        for kept in self.state:
            kept.h.zero_()
            kept.c.zero_()

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape != self.x.shape:
            return super().__call__(x, y)
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.nats


def scorer(model: LanguageModel, lanes: int, chunk: int, chunks: int) -> Scorer:
    """The one that suits the model's device, for a text of so many chunks."""
    if chunks > 2 and model.device.type == "cuda":
        return ReplayedScorer(model, lanes, chunk)
    return Scorer(model, lanes)
