"""Draws text from a model, symbol by symbol, on several streams at once."""

from __future__ import annotations

import codecs
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckpointError, MulstmError
from mulstm.nn import packed
from mulstm.nn.model import LanguageModel
from mulstm.predict import Predictor


@dataclass(frozen=True)
class Sampling:
    """How a symbol is drawn from a distribution."""

    length: int = 500  # symbols drawn on each stream, at most
    temperature: float = 1.0  # 0: always the likeliest
    top_k: int = 0  # only the k likeliest; 0: all
    top_p: float = 1.0  # only the likeliest that together reach p
    seed: int = 1
    stop: bytes = b""  # a stream ends after this text

    def check(self) -> None:
        """Raises MulstmError for impossible values."""
        whole, real = ("__index__", "a whole number"), ("__float__", "a number")  # NumPy's among them
        kinds = {"length": whole, "top_k": whole, "seed": whole, "temperature": real, "top_p": real}
        for name, (method, words) in kinds.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, method):
                raise MulstmError(f"The {name} is {value!r}. Give {words}.")
        if self.seed < 0:
            raise MulstmError(f"The seed {self.seed} is negative. Give 0 or more.")
        if self.length < 0:
            raise MulstmError(f"A length of {self.length} is negative. Give 0 or more symbols.")
        if not 0 <= self.temperature < math.inf:
            raise MulstmError(
                f"A temperature of {self.temperature} is impossible. Give 0 (the likeliest) or more."
            )
        if self.top_k < 0:
            raise MulstmError(f"top-k {self.top_k} is negative. Give 0 (all symbols) or more.")
        if not 0 < self.top_p <= 1:
            raise MulstmError(f"top-p {self.top_p} is not a share. Give a number above 0 and at most 1.")
        if not isinstance(self.stop, bytes):
            raise MulstmError(f"The stop {self.stop!r} is no bytes. Give it encoded.")


def sample(
    model: LanguageModel,
    alphabet: Alphabet,
    prompt: bytes = b"",
    sampling: Sampling | None = None,
    streams: int = 1,
) -> Iterator[list[bytes]]:
    """An iterator that gives, for each symbol drawn, one piece of bytes a stream (b"" once it has ended).

    Stream i of a seed is the same however many streams run beside it, up to rounding. An alphabet with
    start and stop symbols begins with the one and ends a stream at the other.
    """
    how = sampling or Sampling()
    how.check()
    if streams < 1:
        raise MulstmError(f"{streams} streams cannot be drawn. Give 1 or more.")
    predictor = Predictor(model, alphabet, streams)
    begin(predictor, prompt)
    # The GPU's loop knows of symbols without a class by their bias alone, which a high temperature levels.
    is_mild = how.temperature <= 1 or not predictor.never
    plain = how.top_k == 0 and how.top_p == 1 and is_mild
    device = packed.sampler(predictor.model, streams, greedy=how.temperature == 0) if plain else None
    return _draws(predictor, how, device)


def go_on(
    predictor: Predictor, prompt: bytes = b"", sampling: Sampling | None = None
) -> Iterator[list[bytes]]:
    """The same from where a predictor stands, which takes in what is drawn on each of its lanes.

    One that has ended before the others takes in what is drawn on it until they have, too, though nobody
    sees it: of several lanes only the longest can be gone on with.
    """
    how = sampling or Sampling()
    how.check()
    begin(predictor, prompt)
    return _draws(predictor, how, None)  # the GPU's own loop knows nothing of a predictor


def begin(predictor: Predictor, prompt: bytes) -> None:
    """Feeds the prompt, after what stands before a text where it is the first."""
    start = predictor.alphabet.special("start")
    if not predictor.fed and start is not None:
        predictor.feed(np.full(predictor.lanes, start))
    predictor.feed_text(prompt if prompt or predictor.fed else opening(predictor.alphabet))


def _draws(predictor: Predictor, how: Sampling, device: Any | None) -> Iterator[list[bytes]]:
    alphabet, streams = predictor.alphabet, predictor.lanes
    last = alphabet.special("stop")
    tails = [b""] * streams
    ended = [False] * streams
    for symbols in islice(_symbols(predictor, how, device), min(how.length, sys.maxsize)):
        pieces = [b"" if over else alphabet.decode(symbols[i : i + 1]) for i, over in enumerate(ended)]
        yield pieces
        if how.stop:
            tails = [(tail + piece)[-len(how.stop) :] for tail, piece in zip(tails, pieces, strict=True)]
            ended = [over or tail == how.stop for over, tail in zip(ended, tails, strict=True)]
        if last is not None:
            ended = [over or symbol == last for over, symbol in zip(ended, symbols.tolist(), strict=True)]
        if all(ended):
            return


def _symbols(predictor: Predictor, how: Sampling, device: Any | None) -> Iterator[npt.NDArray[np.integer]]:
    """The next symbol of every stream, again and again."""
    dice = [np.random.default_rng([how.seed, i]) for i in range(predictor.lanes)]
    while True:
        weights = filtered(predictor.log_probs(), how)
        symbols = np.array([draw(row, die) for row, die in zip(weights, dice, strict=True)])
        if device is not None:
            yield symbols
            break
        predictor.feed(symbols)
        yield symbols
    # From here on a GPU draws by itself, many symbols a launch, with the same dice.
    state = predictor.state[0]
    device.start(state.h, state.c, torch.from_numpy(symbols), how.temperature)
    while True:
        thrown = np.stack([die.random(device.steps) for die in dice], axis=1)
        drawn = device.run(torch.from_numpy(thrown)).cpu().numpy()
        packed.check_kernels(predictor.device)
        yield from drawn


def opening(alphabet: Alphabet) -> bytes:
    """What stands before a text without a prompt: a newline, else a space, else any symbol."""
    return alphabet.border or alphabet.symbols[:1]


def filtered(log_probs: torch.Tensor, how: Sampling) -> npt.NDArray[np.float64]:
    """(streams, N): the weights to draw with, after temperature, top-k and top-p; rows sum to one."""
    require_numbers(log_probs)
    if how.temperature == 0:
        return torch.nn.functional.one_hot(log_probs.argmax(dim=-1), log_probs.shape[-1]).double().numpy()
    # The largest becomes 0 first: divided by next to nothing, all others are -inf and it stays.
    probs = torch.softmax((log_probs - log_probs.amax(dim=-1, keepdim=True)) / how.temperature, dim=-1)
    if how.top_k:
        values, places = probs.topk(min(how.top_k, probs.shape[-1]), dim=-1)
        probs = torch.zeros_like(probs).scatter(-1, places, values / values.sum(dim=-1, keepdim=True))
    if how.top_p < 1:
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
        # A symbol stays while those before it have not reached p: the likeliest always stays.
        before = torch.nn.functional.pad(ranked.cumsum(dim=-1)[..., :-1], (1, 0))
        ranked = torch.where(before < how.top_p, ranked, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ranked)
    return (probs / probs.sum(dim=-1, keepdim=True)).numpy()


def require_numbers(log_probs: torch.Tensor) -> torch.Tensor:
    """The same; raises CheckpointError where the model gives none."""
    if log_probs.isnan().any():
        raise CheckpointError(
            "The model gives no numbers for the next symbol: its weights are too large, or are none. "
            "Train it again, at a lower rate."
        )
    return log_probs


def draw(weights: npt.NDArray[np.float64], die: np.random.Generator) -> int:
    """One symbol, by inverting the cumulative distribution; a weight of zero is never drawn."""
    cumulative = weights.cumsum()
    place = int(np.searchsorted(cumulative, die.random() * cumulative[-1], side="right"))
    return min(place, int(np.flatnonzero(weights)[-1]))


def as_text(pieces: Iterable[bytes], *, ends: bool = True) -> Iterator[str]:
    """The text of one stream, as it is drawn; bytes that are no UTF-8 become the replacement character.

    Of a text that does not end there, the first bytes of a last character are left out.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        if text := decoder.decode(piece):
            yield text
    if ends and (text := decoder.decode(b"", final=True)):
        yield text
