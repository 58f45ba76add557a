"""The likeliest continuations of a text that a beam search finds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mulstm.data.alphabet import Alphabet
from mulstm.errors import MulstmError
from mulstm.nn.model import LanguageModel
from mulstm.predict import Predictor, no_class
from mulstm.sample import Sampling, begin, require_numbers


@dataclass(frozen=True)
class Found:
    """A continuation and what it costs, its end included where it has one."""

    text: bytes
    nats: float


def beam(
    model: LanguageModel,
    alphabet: Alphabet,
    prompt: bytes = b"",
    *,
    width: int = 16,
    length: int = 500,
    stop: bytes = b"",
) -> list[Found]:
    """Up to `width` continuations, the likeliest first.

    After each symbol only the `width` likeliest are followed: 1 is always the likeliest symbol, more find
    likelier texts. One ends with `stop`, with the alphabet's own stop symbol, or after `length` symbols.
    """
    for name, value, least in (("width", width, 1), ("length", length, 0)):
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
            raise MulstmError(f"The {name} is {value!r}. Give a whole number of at least {least}.")
    Sampling(stop=stop).check()
    predictor = Predictor(model, alphabet)
    begin(predictor, prompt)
    last = alphabet.special("stop")
    silent = range(len(alphabet.symbols), alphabet.size)  # specials: only the stop says something
    never = [symbol for symbol in silent if symbol != last]
    scores = torch.zeros(1, dtype=torch.float64, device="cpu")
    texts = [b""]
    ended = torch.zeros(1, dtype=torch.bool, device="cpu")
    for _ in range(length):
        steps = require_numbers(predictor.log_probs())
        steps[:, never] = -math.inf
        # A text that has ended is its own one continuation, and stays while it is likely enough.
        steps[ended] = -math.inf
        steps[ended, 0] = 0.0
        sums = (scores.unsqueeze(1) + steps).flatten()
        places = sums.argsort(descending=True, stable=True)[: min(width, int(sums.isfinite().sum()))]
        if not len(places):
            raise no_class()
        scores = sums[places]
        parents, symbols = places // alphabet.size, places % alphabet.size
        before = ended[parents]
        texts = [
            texts[parent] if over else texts[parent] + alphabet.decode([symbol])
            for parent, symbol, over in zip(parents.tolist(), symbols.tolist(), before.tolist(), strict=True)
        ]
        stopped = [bool(stop) and text.endswith(stop) for text in texts]
        ended = before | torch.tensor(stopped, device="cpu") | (symbols == (-1 if last is None else last))
        if ended.all():
            break
        predictor.follow(parents)
        predictor.feed(symbols)
    return [Found(text, 0.0 - score) for text, score in zip(texts, scores.tolist(), strict=True)]
