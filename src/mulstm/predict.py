"""The model one symbol at a time, for whoever settles the next: sampling, a demo."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckpointError, MulstmError
from mulstm.nn.model import LanguageModel, bare
from mulstm.nn.packed import check_kernels
from mulstm.ops.reference import State

Symbols = npt.NDArray[np.integer] | Tensor
NO_CLASS = -1e3  # importers give such a symbol an output bias below this, and no weights
LONGEST = 256  # a long prompt is fed in pieces of this length, so that memory stays constant


def impossible(model: LanguageModel) -> tuple[int, ...]:
    """Symbols that the output layer has no class for, as in a foreign head: they are never predicted.

    The bias alone does not tell: a run that diverged may leave any.
    """
    if model.b_out is None:
        return ()
    none = (model.b_out.detach() <= NO_CLASS) & (model.W_out.detach() == 0).all(dim=1)
    return tuple(torch.nonzero(none).flatten().tolist())


def no_class() -> CheckpointError:
    """What to raise where nothing can be predicted."""
    return CheckpointError("The model's output layer has no class for any symbol. Take another model.")


class Predictor:
    """log_probs -> the caller settles a symbol -> feed(it), for several lanes at once.

    A step is the recurrence that training uses, with T = 1: nothing is written twice.
    """

    def __init__(self, model: LanguageModel, alphabet: Alphabet, lanes: int = 1) -> None:
        model = bare(model)
        alphabet.require_size(model.alphabet_size)
        if isinstance(lanes, bool) or not hasattr(lanes, "__index__") or lanes < 1:
            raise MulstmError(f"{lanes!r} lanes cannot be read or drawn. Give 1 or more.")
        # Folded, a step does no work that does not depend on the symbol.
        self.model = model.folded().eval()
        self.alphabet = alphabet
        self.lanes = lanes
        self.device = self.model.device
        self.never = list(impossible(self.model))
        if len(self.never) == alphabet.size:
            raise no_class()
        self.reset()

    @property
    def fed(self) -> bool:
        """Whether it has taken in anything yet."""
        return self._logits is not None

    def reset(self) -> None:
        """Forgets everything fed so far."""
        self.state: tuple[State, ...] = self.model.zero_state(self.lanes)
        # Before the first symbol nothing is known, and all are equally likely.
        self._logits: Tensor | None = None

    def go_on_from(self, logits: Tensor, state: tuple[State, ...]) -> None:
        """Takes over from whoever read the text: logits after its last symbol, (lanes, N), and the state."""
        self.state, self._logits = state, logits

    def follow(self, lanes: Tensor | Sequence[int]) -> None:
        """Goes on with these of its lanes, each as often as it is named: there may be more or fewer then."""
        at = torch.as_tensor(lanes, device=self.device)
        self.lanes = len(lanes)
        self.state = tuple(State(layer.h[at], layer.c[at]) for layer in self.state)
        self._logits = None if self._logits is None else self._logits[at]

    def log_probs(self) -> Tensor:
        """(lanes, N): the natural logarithm of the next symbol's distribution, float64 on the CPU."""
        if self._logits is None:
            size = self.alphabet.size
            return torch.full((self.lanes, size), -math.log(size), dtype=torch.float64, device="cpu")
        logits = self._logits.to("cpu", torch.float64)
        check_kernels(self.device)
        log_p = torch.log_softmax(logits, dim=-1)
        if self.never:  # their bias is finite, and who draws may divide by any temperature
            log_p[:, self.never] = -math.inf
        return log_p

    @torch.inference_mode()
    def feed(self, symbols: Symbols) -> None:
        """Takes in the next symbol of each lane, (lanes,), or several, (lanes, T)."""
        for piece in torch.split(self._rows(symbols), LONGEST, dim=1):
            logits, self.state = self.model(piece, self.state)
            self._logits = logits[:, -1]

    def _rows(self, symbols: Symbols) -> Tensor:
        """(lanes, T), where the model is."""
        given = np.asarray(symbols)
        # A single step is given what was drawn; looking at it would take a tenth of the step.
        is_outside = (
            given.ndim > 1 and given.size and not 0 <= given.min() <= given.max() < self.alphabet.size
        )
        if given.dtype.kind not in "iu" or is_outside:
            raise ValueError(f"Symbols are whole numbers from 0 to {self.alphabet.size - 1}. Give such.")
        x = torch.as_tensor(given, device="cpu").to(self.device, torch.long)
        x = x.unsqueeze(-1) if x.dim() == 1 else x
        if x.dim() != 2 or x.shape[0] != self.lanes:
            raise ValueError(
                f"The symbols are {tuple(given.shape)}. Give ({self.lanes},), one a lane, or more columns."
            )
        return x

    def feed_text(self, text: bytes) -> None:
        """Takes in the same text on every lane."""
        if not isinstance(text, (bytes, bytearray)):
            raise MulstmError(f"The text {text!r:.40} is no bytes. Give it encoded.")
        if text:
            symbols = np.asarray(self.alphabet.encode(text))
            self.feed(np.broadcast_to(symbols, (self.lanes, symbols.size)).copy())
