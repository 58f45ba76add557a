"""Dynamic evaluation: a model goes on learning from the text it is measured on, always scoring first."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from mulstm import tensorfile
from mulstm.checkpoint import fingerprint
from mulstm.data import store
from mulstm.data.alphabet import Alphabet
from mulstm.data.corpus import Split
from mulstm.data.lanes import Lanes
from mulstm.errors import CheckpointError, DataError, MulstmError, RunError, no_number
from mulstm.evaluate import Evaluation, Losses
from mulstm.nn.model import LanguageModel
from mulstm.nn.packed import check_kernels
from mulstm.ops import State, modes
from mulstm.ops.graphs import recorded
from mulstm.record_corpus import RecordSplit
from mulstm.units import bits_per_char

ASK_EVERY = 100  # segments
MOVES = 40.0  # near the best rate x parameters on validation for models of 0.5 and of 22 million
FASTEST = 1e-4  # near the best rate for those of 0.07 to 0.5 million, which the rule above moves too far
SLOWEST = 2e-6  # near or below the best rate for those of 46 million, which it moves too little
LANES, BATCHES = 100, 500  # whose gradients the statistics are
Statistics = dict[str, Tensor]  # parameter name -> R, the root mean square of its mini-batch gradients


@dataclass(frozen=True)
class Settings:
    """How far each segment moves the model, and how strongly it is pulled back to what it was."""

    segment: int = 20  # symbols scored, then learnt from
    rate: float | None = None  # None: MOVES / the model's parameters, from SLOWEST to FASTEST
    pull: float = 1e-3  # towards the trained weights, after each segment
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.segment < 1:
            raise MulstmError(f"A segment of {self.segment} symbols is none. Give 1 or more.")
        for name in ("rate", "pull", "epsilon"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise MulstmError(f"The {name} of dynamic evaluation is {value}. Give a number of 0 or more.")

    def rate_of(self, model: LanguageModel) -> float:
        """The rate, or what a model of this size is likely to bear: all its weights move at once."""
        if self.rate is not None:
            return self.rate
        return min(max(MOVES / model.parameter_count(), SLOWEST), FASTEST)


def moving(model: LanguageModel) -> LanguageModel:
    """The same function as it is best moved: without weight norm, so that the matrices themselves move.

    The embedding stays: multiplied in, each symbol would have columns of its own, and a segment in which a
    rare one occurs would move them by a hundred times what the statistics of all text allow for.
    """
    return model.folded(embedding=False).eval()


def batches_of(split: Split, lanes: int, segment: int, batches: int) -> tuple[Lanes, int]:
    """What statistics are gathered from, and how many batches of it: a short text has fewer of both."""
    chunks = Lanes(split, min(lanes, max(1, split.symbols_count // segment)), segment, trim=True)
    return chunks, min(batches, len(chunks))


@modes.learning
def gather_statistics(
    model: LanguageModel,
    split: Split,
    *,
    lanes: int = LANES,
    segment: int = 20,
    batches: int = BATCHES,
    progress: Callable[[int, int], None] | None = None,  # is told how many batches are done, of how many
) -> Statistics:
    """R of every parameter: root mean square of its gradients over batches of `lanes` x `segment` symbols."""
    _require_text(split)
    split.alphabet.require_size(model.alphabet_size)
    if min(lanes, segment, batches) < 1:
        raise MulstmError(
            f"{batches} batches of {lanes} x {segment} symbols are none. Give 1 or more of each."
        )
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    squares = {name: torch.zeros_like(p) for name, p in parameters.items()}
    device = next(iter(parameters.values())).device
    if split.symbols_count < segment:
        raise DataError(
            f"A segment of {segment:,} symbols is longer than the {split.name} part of {split.corpus}, which "
            f"has {split.symbols_count:,}. Give a shorter --segment."
        )
    chunks, count = batches_of(split, lanes, segment, batches)
    state: tuple[State, ...] | None = None
    for k in range(count):
        chunk = chunks.chunk_at(k)
        x, y = (torch.from_numpy(part).to(device, torch.long) for part in (chunk.x, chunk.y))
        logits, state = functional_call(model, parameters, (x, state))
        state = tuple(kept.detach() for kept in state)
        nats = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        for name, g in zip(parameters, torch.autograd.grad(nats, list(parameters.values())), strict=True):
            squares[name].addcmul_(g, g, value=1 / count)
        if progress is not None:
            progress(k + 1, count)
    check_kernels(device)
    if not all(s.isfinite().all() for s in squares.values()):
        raise no_number(f"the {split.name} part of {split.corpus}", model.precision)
    return {name: s.sqrt_() for name, s in squares.items()}


def kept_statistics(
    folder: Path,
    model: LanguageModel,
    alphabet: Alphabet,
    split: Split,
    *,
    progress: Callable[[int, int], None] | None = None,
    **how: int,
) -> Statistics:
    """Those kept in `folder`, if they are of this very model and text and gathered so; else they are made."""
    if model.is_altered:  # no fingerprint tells of hooks
        return gather_statistics(model, split, progress=progress, **how)
    wanted: dict[str, str | int] = {
        "model": fingerprint(model, alphabet),
        "text": split.text.checksum(split.start, split.stop),
        "precision": model.precision,
        **how,
    }
    digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()
    file = folder / f"{digest[:32]}.safetensors"
    if file.is_file():
        with contextlib.suppress(CheckpointError):  # a damaged copy is made again
            tensors, meta = tensorfile.read(file, "statistics")
            if meta.get("of") == wanted:
                return tensors
    R = gather_statistics(model, split, progress=progress, **how)
    with contextlib.suppress(OSError, DataError, RunError):  # no room for them: made again next time
        store.make_room(folder, "Statistics cannot be kept in")
        tensorfile.write(file, R, {"kind": "statistics", "of": wanted})
    return R


class Learner:
    """A private copy of a model that is scored on a segment, then learns from it. The original stays."""

    def __init__(self, model: LanguageModel, statistics: Statistics, settings: Settings) -> None:
        self.model = copy.deepcopy(model)
        named = dict(self.model.named_parameters())
        self.names = list(named)
        self.theta: list[Tensor] = list(named.values())
        self.theta_0 = [p.detach().clone() for p in self.theta]
        if {name: p.shape for name, p in named.items()} != {name: r.shape for name, r in statistics.items()}:
            raise DataError(
                "The statistics are of another model. Gather them of the very one that is to move."
            )
        R = [statistics[name].to(p.device) for name, p in named.items()]
        mean = sum(float(r.sum(dtype=torch.float64)) for r in R) / sum(r.numel() for r in R)
        rate = settings.rate_of(self.model)
        # What no text has moved stays, also without an epsilon.
        scale = [r + settings.epsilon for r in R]
        self.step = [torch.where(s > 0, rate / s, 0.0) for s in scale]
        # A text of one symbol has no gradients, and nothing to be pulled back.
        self.pull = [(settings.pull / (mean or 1.0) * r).clamp_(max=1.0) for r in R]
        self.state = self.model.zero_state(1)

    def learn(self, x: Tensor, y: Tensor) -> Tensor:
        """Nats of each of the segment's symbols, (T,), before the model has learnt from any of them."""
        # New leaves each time: autograd ties one to the stream that first used it, which a capture forbids.
        leaves = {name: p.detach().requires_grad_() for name, p in zip(self.names, self.theta, strict=True)}
        logits, state = functional_call(self.model, leaves, (x, self.state))
        nats = F.cross_entropy(logits[0], y[0], reduction="none")
        g = torch.autograd.grad(nats.mean(), list(leaves.values()))
        with torch.no_grad():
            torch._foreach_lerp_(self.theta, self.theta_0, self.pull)
            torch._foreach_addcmul_(self.theta, g, self.step, value=-1.0)
            for kept, new in zip(self.state, state, strict=True):
                kept.h.copy_(new.h)
                kept.c.copy_(new.c)
        return nats.detach()


class GraphedLearner:
    """The same learner with a whole segment captured in one CUDA graph."""

    def __init__(self, learner: Learner, segment: int) -> None:
        device = learner.theta[0].device
        self.x = torch.zeros(1, segment, dtype=torch.long, device=device)
        self.y = torch.zeros_like(self.x)
        moving = (*learner.theta, *(t for s in learner.state for t in s))
        kept = [tensor.clone() for tensor in moving]
        learn = partial(learner.learn, self.x, self.y)
        self.graph, self.nats = recorded(device, learn, before=learn, times=3)
        with torch.no_grad():
            for tensor, was in zip(moving, kept, strict=True):
                tensor.copy_(was)

    def learn(self, x: Tensor, y: Tensor) -> Tensor:
        """As Learner.learn, for segments of the captured length."""
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.nats


@modes.learning
def evaluate_dynamic(
    model: LanguageModel,
    split: Split,
    statistics: Statistics,
    settings: Settings,
    *,
    symbols: int = 0,  # of the split's beginning; 0: all
    progress: Callable[[int, float], None] | None = None,  # gets the symbols read and their bits/char so far
) -> Evaluation:
    """One lane, one pass, every symbol scored before a copy of `model` learns from it.

    All parameters move as they are: give `moving(model)`, here and to `gather_statistics`, as a rule.
    """
    _require_text(split)
    split.alphabet.require_size(model.alphabet_size)
    if symbols < 0:
        raise MulstmError(f"{symbols} symbols cannot be read. Give 1 or more, or 0 for all.")
    learner = Learner(model, statistics, settings)
    device = learner.theta[0].device
    total = min(symbols, split.symbols_count) if symbols else split.symbols_count
    text = torch.from_numpy(split.read(-1, total)).to(device)[None]
    started = time.perf_counter()
    fast: Learner | GraphedLearner = learner
    if device.type == "cuda" and total >= settings.segment:
        fast = GraphedLearner(learner, settings.segment)
    losses = torch.empty(total, dtype=torch.float32, device=device)
    for start in range(0, total, settings.segment):
        stop = min(start + settings.segment, total)
        x, y = text[:, start:stop].long(), text[:, start + 1 : stop + 1].long()
        losses[start:stop] = (fast if stop - start == settings.segment else learner).learn(x, y)
        # Asking for the sum makes a GPU wait, so it is asked for now and then only.
        if progress is not None and start // settings.segment % ASK_EVERY == ASK_EVERY - 1:
            progress(stop, bits_per_char(float(losses[:stop].sum(dtype=torch.float64)), stop))
    nats = float(losses.sum(dtype=torch.float64))
    if progress is not None:
        progress(total, bits_per_char(nats, total))
    check_kernels(device)
    if not math.isfinite(nats):
        raise DataError(
            f"Dynamic evaluation diverged at rate {settings.rate_of(model):g}. "
            "Lower the rate or raise the pull-back."
        )
    return Evaluation(
        nats=nats,
        symbols=total,
        words=split.words if total == split.symbols_count else None,
        seconds=time.perf_counter() - started,
        losses=losses.cpu().numpy(),
    )


def got_worse(losses: Losses) -> bool:
    """Whether a text's last tenth cost more than twice its first, which had a cold start."""
    tenth = len(losses) // 10
    return bool(tenth and losses[-tenth:].mean() > 2 * losses[:tenth].mean())


def _require_text(split: Split) -> None:
    """Raises DataError where there is no one text to learn from as it is read."""
    if isinstance(split, RecordSplit):
        raise DataError(
            f"{split.corpus} is a file of records, and dynamic evaluation learns from one text as it reads. "
            "Take a model that was trained on a text, or measure without --dynamic."
        )
    split.require_symbols()
