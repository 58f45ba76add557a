"""Times our models without gradients: a text in many lanes, and drawing one symbol after another."""

from __future__ import annotations

import torch
from torch import Tensor

from mulstm.bench.floor import Work
from mulstm.bench.layers import E
from mulstm.bench.timing import Contender, Ready, Session, rms
from mulstm.bench.updates import GRAPH, exact, model_of, recipe, work_of
from mulstm.errors import BackendError
from mulstm.nn.model import LanguageModel
from mulstm.nn.packed import sampler
from mulstm.recipe import ModelRecipe
from mulstm.replay import scorer

BLOCKS, STEPS = 5, 64  # of a measurement of sampling: blocks, and symbols of each


def _model(H: int, device: str) -> tuple[LanguageModel, int]:
    """A model as `evaluate` and `sample` use it, and how many parameters it was made of."""
    model = model_of(recipe(ModelRecipe(hidden=H, embedding=E, weight_norm=True), 1, 1), device)
    with torch.no_grad():
        model.W_out.mul_(50.0)  # logits that differ, so that what is drawn depends on the state
    return model.folded().eval(), model.parameter_count()


class Evaluation:
    """A text streamed through the model, one graph a chunk; a call reads `chunks` of them."""

    def __init__(self, H: int, lanes: int, chunk: int, chunks: int, device: str) -> None:
        self.model, self.parameters = _model(H, device)
        self.chunks = chunks
        self.score = scorer(self.model, lanes, chunk, chunks)
        self.sets = [
            torch.randint(self.model.alphabet_size, (2, lanes, chunk), device=device) for _ in range(3)
        ]
        self.nats = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def __call__(self) -> None:
        for k in range(self.chunks):
            self.nats += self.score(*self.sets[k % 3]).sum(dtype=torch.float64)

    @torch.no_grad()
    def error(self) -> float:
        """Of the nats of a chunk about their mean, from a zero state."""
        for kept in self.score.state:
            kept.h.zero_()
            kept.c.zero_()
        ours = self.score(*self.sets[0]).double()
        truth, _ = exact(self.model).losses(*self.sets[0])
        return rms(ours - truth.mean(), truth - truth.mean())


class Sampling:
    """Symbols drawn one after another on the device, read back block by block."""

    def __init__(self, H: int, streams: int, device: str) -> None:
        self.model, self.parameters = _model(H, device)
        self.work = sampler(self.model, streams, greedy=False, steps=STEPS)
        if self.work is None:
            raise BackendError(f"There is no sampler for {streams} streams. Give at most 4.")
        self.dice = torch.rand(STEPS, streams, device=device)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        for _ in range(BLOCKS):
            drawn: Tensor = self.work.run(self.dice).cpu()
        return drawn

    @torch.no_grad()
    def error(self) -> float:
        """Of the last logits of a block, by a model in float64 that reads the same symbols."""
        streams = self.dice.shape[1]
        zero = self.model.zero_state(streams)[0]
        first = torch.zeros(streams, dtype=torch.int32, device=self.dice.device)
        self.work.start(zero.h, zero.c, first, 1.0)
        drawn = self.work.run(self.dice)  # (steps, streams)
        read = torch.cat([first[None], drawn[:-1]]).t().long()
        logits, _ = exact(self.model)(read)
        return rms(self.work.logits[:, : logits.shape[2]], logits[:, -1])


def evaluation(session: Session, H: int, lanes: int, chunk: int, chunks: int) -> Contender:
    """`chunks` at a time are one measurement."""

    def prepare() -> Ready:
        work = Evaluation(H, lanes, chunk, chunks, session.device)
        return Ready(work, work.parameters, work.error)

    def work_done(ready: Ready) -> Work:
        return work_of(ModelRecipe(hidden=H), lanes, chunk, backward=False)

    return Contender(
        "mlstm", GRAPH, "evaluate", H, lanes, chunk, work_done, prepare, slow=True, inside=chunks
    )


def sampling(session: Session, H: int, streams: int) -> Contender:
    """BLOCKS of STEPS symbols are one measurement."""

    def prepare() -> Ready:
        work = Sampling(H, streams, session.device)
        return Ready(work, work.parameters, work.error)

    def work_done(ready: Ready) -> Work:
        return work_of(ModelRecipe(hidden=H), streams, STEPS, backward=False)

    return Contender("mlstm", GRAPH, "sample", H, streams, STEPS, work_done, prepare, inside=BLOCKS)
