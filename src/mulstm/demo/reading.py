"""What the page shows of a text: the bits of each character, what was expected there, and what comes next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mulstm.checkpoint import Checkpoint
from mulstm.convention import Symbols
from mulstm.embedding import require_units
from mulstm.errors import DataError, MulstmError, no_number
from mulstm.heat import Scale, characters, visible
from mulstm.ops.reference import State
from mulstm.predict import Predictor, impossible
from mulstm.sample import Sampling, as_text, go_on, opening
from mulstm.scoring import likeliest, require_possible, symbol_name
from mulstm.scoring.page import HIGHEST, HIGHEST_RESIDUE
from mulstm.units import bits

PIECE = 32  # symbols between two states that are kept
MOST = 20_000  # bytes of a text
GUESSES = 3  # likeliest symbols told for each place
NEXT = 10  # and for the one after the text

Call = Callable[[Tensor, tuple[State, ...]], tuple[Tensor, Tensor, tuple[State, ...]]]
Over = Callable[[], bool]  # whether nobody waits for it any more


class BrokenOffError(MulstmError):
    """A reading that nobody waits for was ended before its end."""

    def __init__(self) -> None:
        super().__init__("Nobody waits for this text any more. Send it again.")


class Memory:
    """What a model makes of a text, kept so that a text with the same beginning is read from there on."""

    def __init__(self, call: Call, state: tuple[State, ...]) -> None:
        self.call = call
        self.symbols: Symbols = np.empty(0, dtype=np.int16)
        self.h: list[Tensor] = []  # (symbols, H) of each piece, on the CPU
        self.logits: list[Tensor] = []  # (symbols, N), in float32
        self.states = [state]  # before the first piece, and after each

    @torch.inference_mode()
    def read(self, symbols: Symbols, is_over: Over) -> Tensor:
        """The logits of a whole text, (symbols, N); what was read stays, even if broken off."""
        common = min(symbols.size, self.symbols.size)
        differ = np.flatnonzero(symbols[:common] != self.symbols[:common])
        whole = int(differ[0] if differ.size else common) // PIECE
        del self.h[whole:], self.logits[whole:], self.states[whole + 1 :]
        self.symbols = symbols[: whole * PIECE]
        for start in range(whole * PIECE, symbols.size, PIECE):
            if is_over():
                raise BrokenOffError
            x = torch.from_numpy(symbols[None, start : start + PIECE]).long().to(self.states[0][0].h.device)
            h, logits, state = self.call(x, self.states[-1])
            self.h.append(h[0].cpu())
            self.logits.append(logits[0].float().cpu())
            self.states.append(state)
            self.symbols = symbols[: start + PIECE]
        return torch.cat(self.logits)


class Reader:
    """One model and the text it was last shown, for one person at a time."""

    def __init__(self, loaded: Checkpoint) -> None:
        loaded.require_head()
        self.convention = loaded.convention
        self.protein = self.convention.name == "protein"
        self.names = [visible(symbol_name(self.convention, k)) for k in range(loaded.alphabet.size)]
        self.predictor = Predictor(loaded.model, loaded.alphabet)
        model = self.predictor.model
        self.never = impossible(model)
        self.memory = Memory(model.hidden_and_logits, model.zero_state(1))
        self.lock = threading.Lock()
        self.turn = 0  # of going on: a later one ends those before it
        self.closed = False

    def close(self) -> None:
        """Ends what is being read or drawn; from a signal's handler, so without the lock."""
        self.closed = True

    def read(self, text: str, unit: int | None = None, is_over: Over = lambda: False) -> dict[str, Any]:
        """One object for the page; with a unit the text is coloured by that unit's h."""
        before, own = self._symbols(text)
        require_possible(own, self.never, self.convention, "The text")
        symbols = np.concatenate([before, own])
        if unit is not None:
            require_units(self.predictor.model, [unit])
        with self.lock:
            log_p = torch.log_softmax(self.memory.read(symbols, self._over(is_over)).double(), dim=-1)
            h = None
            if unit is not None:
                h = torch.cat([piece[:, unit].double() for piece in self.memory.h])[before.size :]
        if not log_p.isfinite().all() or (h is not None and not h.isfinite().all()):
            raise no_number("this text", self.predictor.model.precision)
        expected = log_p[before.size - 1 : -1]  # what was known before each of the text's own symbols
        losses = -bits(1.0) * expected.gather(1, torch.from_numpy(own).long()[:, None])[:, 0].numpy()
        values = losses if h is None else h.numpy()
        scale = self._scale(unit, values)
        return {
            "bits": float(losses.sum()),
            "symbols": own.size,
            "characters": list(self._characters(own, losses, values, scale, expected)),
            "next": likeliest(log_p[-1:].exp(), self.names, NEXT)[0],
            "scale": {"low": scale.low, "high": scale.high, "name": scale.unit, "both": scale.diverging},
        }

    def go_on(self, text: str, how: Sampling, is_over: Over = lambda: False) -> Iterator[str]:
        """Pieces of text as they are drawn, until the length is reached or somebody else's turn begins.

        A character that is not whole by then is left out: its first bytes would be read as another one.
        """
        how.check()
        symbols = np.concatenate(self._symbols(text, clean=False))
        with self.lock:
            self.turn += 1
            turn = self.turn
            last = self.memory.read(symbols, self._over(is_over))[-1]
            self.predictor.go_on_from(last[None], self.memory.states[-1])
            drawn = go_on(self.predictor, sampling=how)
        return as_text(self._pieces(drawn, turn), ends=False)

    def _over(self, is_over: Over) -> Over:
        return lambda: self.closed or is_over()

    def _pieces(self, drawn: Iterator[list[bytes]], turn: int) -> Iterator[bytes]:
        while True:
            with self.lock:
                pieces = next(drawn, None) if turn == self.turn and not self.closed else None
            if pieces is None:
                return
            yield pieces[0]

    def _symbols(self, text: str, clean: bool = True) -> tuple[Symbols, Symbols]:
        """What stands before a text, and its own symbols; as it stands, unless it is to be made clean."""
        try:
            raw = text.encode()
        except UnicodeEncodeError:
            raise DataError("The text has half a character in it. Take it out.") from None
        if len(raw) > MOST:
            raise DataError(f"The text has {len(raw):,} bytes. Give at most {MOST:,}.")
        if self.protein:  # pasted in lines, in either case
            raw = b"".join(raw.split()).upper()
        start = self.convention.start
        if not start.size:
            start = self.convention.encoded(opening(self.convention.alphabet))
        return start, self.convention.encoded(self.convention.cleaned(raw) if clean else raw)

    def _scale(self, unit: int | None, values: npt.NDArray[np.float64]) -> Scale:
        if unit is None:
            return Scale("bits", 0.0, HIGHEST_RESIDUE if self.protein else HIGHEST)
        end = max(float(np.abs(values).max(initial=0.0)), 1e-6)
        return Scale(f"h of unit {unit}", -end, end, diverging=True, adds=False)

    def _characters(
        self,
        own: Symbols,
        losses: npt.NDArray[np.float64],
        values: npt.NDArray[np.float64],
        scale: Scale,
        expected: Tensor,
    ) -> Iterator[dict[str, Any]]:
        """A character of several bytes costs what they cost together; the guesses are those of its first."""
        text, place = self.convention.alphabet.decode(own), 0
        guesses = likeliest(expected.exp(), self.names, GUESSES)
        pairs = zip(characters(text, losses), characters(text, values, scale.adds), strict=True)
        for (character, cost), (_, value) in pairs:
            yield {
                "text": visible(character),
                "bits": cost,
                "value": value,
                "level": scale.level(value),
                "guesses": guesses[place],
            }
            place += len(character.encode())
