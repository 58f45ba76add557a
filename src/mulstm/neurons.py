"""Single units: followed over a text, and held at a value while text is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mulstm import heat
from mulstm.checkpoint import Checkpoint
from mulstm.data.alphabet import Alphabet
from mulstm.embedding import require_units
from mulstm.errors import DataError, MulstmError, no_number
from mulstm.files import replacing
from mulstm.heat import Part, Scale
from mulstm.nn.model import LanguageModel
from mulstm.nn.packed import check_kernels
from mulstm.ops.reference import State
from mulstm.predict import Predictor, Symbols
from mulstm.records import Record

# Figures by their ending, with what must be left out for equal ones to be equal files.
UNDATED: dict[str, Any] = {".svg": {"Date": None}, ".png": {"Software": None}, ".pdf": {"CreationDate": None}}
LEGIBLE = 120  # symbols that fit under a figure's axis


@dataclass(frozen=True)
class Trace:
    """What units did over a record's own symbols, and over what ends it where its representation has that."""

    id: str
    text: bytes
    units: tuple[int, ...]
    of: str  # "h" or "c"
    values: npt.NDArray[np.float64]  # (symbols, units)


@torch.inference_mode()
def trace(loaded: Checkpoint, record: Record, units: Sequence[int], of: str = "h") -> Trace:
    """The units' h or c of the last layer after each of the record's own symbols; the last is `embed`'s.

    One symbol at a time, because c is known only where a chunk ends; nothing but the numbers is kept.
    """
    model = loaded.model
    require_units(model, units)
    if of not in ("h", "c"):
        raise MulstmError(f'A unit has h and c, not "{of}". Give one of these.')
    if of == "c" and model.c_width == 0:
        raise MulstmError(f"The cell {model.recipe.cell} has no c. Trace h.")
    convention = loaded.convention
    symbols = convention.read(record.text, record.id)
    before, _ = convention.around
    x = torch.from_numpy(symbols).to(model.device).long().unsqueeze(0)
    chosen = list(units)
    values = np.empty((symbols.size, len(chosen)))
    state: tuple[State, ...] = model.zero_state(1)
    with model.evaluating():
        for t in range(symbols.size):
            _, state = model.hidden(x[:, t : t + 1], state)
            values[t] = getattr(state[-1], of)[0, chosen].double().cpu().numpy()
    check_kernels(x.device)
    if not np.isfinite(values).all():
        raise no_number(f"record {record.id}", model.precision)
    return Trace(record.id, loaded.alphabet.decode(symbols[before:]), tuple(units), of, values[before:])


class Clamped(Predictor):
    """A predictor some of whose last layer's h are held at given values, for the output and the next step."""

    def __init__(
        self, model: LanguageModel, alphabet: Alphabet, lanes: int = 1, *, units: Mapping[int, float]
    ) -> None:
        require_units(model, units)
        self._units = dict(units)
        super().__init__(model, alphabet, lanes)

    @torch.inference_mode()
    def feed(self, symbols: Symbols) -> None:
        """As the plain predictor does, but symbol by symbol."""
        for column in torch.split(self._rows(symbols), 1, dim=1):
            _, states = self.model.hidden(column, self.state)
            h = states[-1].h.clone()
            for unit, value in self._units.items():
                h[:, unit] = value
            self.state = (*states[:-1], states[-1]._replace(h=h))
            self._logits = self.model.output([layer.h for layer in self.state])


def draw(found: Trace, path: Path) -> None:
    """A figure of the units over the text, as .svg, .png or .pdf; equal traces give equal files."""
    if path.suffix not in UNDATED:
        raise DataError(f"{path.name} is no figure. End it in one of: {', '.join(UNDATED)}.")
    from mulstm.report.canvas import canvas

    n = len(found.values)
    with canvas((min(14.0, max(6.0, n * 0.12)), 3.2)) as picture:
        axes = picture.subplots()
        axes.axhline(0.0, color="#8a8a8a", linewidth=0.8)
        for k, unit in enumerate(found.units):
            axes.plot(np.arange(n), found.values[:, k], label=f"unit {unit}")
        axes.set_ylabel(found.of)
        axes.set_title(f"{found.of} of {_list(found.units)}")
        if n <= LEGIBLE and len(found.text) == n:
            axes.set_xticks(np.arange(n), [_tick(byte) for byte in found.text], fontfamily="monospace")
            axes.grid(visible=False, axis="x")
        else:
            axes.set_xlabel("symbol")
        if len(found.units) > 1:
            axes.legend()
        with replacing(path) as temporary:
            picture.savefig(temporary, format=path.suffix[1:], metadata=UNDATED[path.suffix])


def write_page(found: Sequence[Trace], path: Path) -> None:
    """The texts coloured by the first unit's values."""
    top = max((float(np.abs(one.values[:, 0]).max()) for one in found if one.values.size), default=1.0)
    top = float(f"{max(top, 1e-6):.1g}")
    scale = Scale(found[0].of, -top, top, diverging=True, adds=False)
    lead = "Each character is coloured by the unit's value after it. Rest on a character for its number."
    parts = [Part(one.id, _list(one.units[:1]), one.text, one.values[:, 0]) for one in found]
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as out:
        out.writelines(heat.page(f"{found[0].of} of {_list(found[0].units[:1])}", lead, parts, scale))


def _list(units: Sequence[int]) -> str:
    return ("unit " if len(units) == 1 else "units ") + ", ".join(map(str, units))


def _tick(byte: int) -> str:
    return chr(byte) if 33 <= byte < 127 else "·"
