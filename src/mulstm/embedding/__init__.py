"""Representations: what a model's state says about a text, for any number of texts of any lengths."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mulstm import checkpoint
from mulstm.checkpoint import Checkpoint
from mulstm.embedding import files
from mulstm.embedding.store import Store
from mulstm.errors import DataError, no_number
from mulstm.nn.model import LanguageModel
from mulstm.packing import LANES, Packed, Symbols, run
from mulstm.records import Record, texts

__all__ = ["Embedded", "Representations", "Summary", "embed", "embed_file", "embedded", "require_readable"]

Array = npt.NDArray[np.float32]


class Representations(NamedTuple):
    """One row a text, in the order given; "the" UniRep vector is h_mean."""

    h_mean: Array  # (n, H)  mean of h over the text
    h_final: Array  # (n, H)
    c_final: Array  # (n, H)

    @property
    def joined(self) -> Array:
        """All three side by side, (n, 3H)."""
        return np.concatenate(self, axis=1)


class Embedded(NamedTuple):
    """Some texts that ended in one chunk; records are their places in the input."""

    records: list[int]
    h_mean: Array  # (k, H)
    h_final: Array
    c_final: Array


class Summary(NamedTuple):
    """What embed_file did."""

    records: int
    symbols: int
    seconds: float


def embed(
    model: Checkpoint | str | os.PathLike[str],
    sequences: str | bytes | Iterable[str | bytes],
    *,
    lanes: int = LANES,
) -> Representations:
    """The representations of texts or proteins, under the model's own convention, in memory."""
    loaded = checkpoint.of(model)
    convention = loaded.convention
    given = list(texts(sequences))
    H = loaded.model.recipe.hidden
    widths = (H, H, loaded.model.c_width)
    rows = Representations(*(np.zeros((len(given), width), dtype=np.float32) for width in widths))
    symbols = (convention.read(text, str(k)) for k, text in enumerate(given, 1))
    for part in embedded(loaded, symbols, lanes=lanes):
        for array, values in zip(rows, part[1:], strict=True):
            array[part.records] = values
    return rows


def embedded(
    loaded: Checkpoint,
    symbols: Iterable[Symbols],
    *,
    lanes: int = LANES,
    positions: Callable[[int, int, Array], None] | None = None,
) -> Iterator[Embedded]:
    """Representations as texts end, in any order; `positions` is handed (record, place, h) on the way."""
    model = loaded.model
    total = torch.zeros(0, model.recipe.hidden, dtype=torch.float64, device=model.device)
    for packed, h, state in run(model, model.hidden, symbols, lanes=lanes):
        B, T = packed.x.shape
        # Float64, because a text of 30,000 symbols is a long sum.
        total = torch.cat([total[packed.kept], total.new_zeros(B - len(packed.kept), total.shape[1])])
        total += _summed(packed, h)
        if positions is not None:
            _hand_over(packed, h, positions)
        if packed.ended:
            lengths = torch.tensor(packed.start[packed.ended] + T, device=total.device)
            part = Embedded(
                [packed.record[lane] for lane in packed.ended],
                _array(total[packed.ended] / lengths.unsqueeze(-1)),
                _array(h[packed.ended, -1]),
                _array(state.c[packed.ended]),
            )
            _require_numbers(part, model.precision)
            yield part


def _require_numbers(part: Embedded, precision: str) -> None:
    for row, record in enumerate(part.records):
        if not all(np.isfinite(vectors[row]).all() for vectors in part[1:]):
            raise no_number(f"record {record + 1}", precision)


@dataclass(frozen=True)
class Wanted:
    """Which representations a file holds."""

    vectors: tuple[str, ...] = ("h_mean", "h_final", "c_final")  # or "joined"
    positions: bool = False  # every h of the text's own symbols
    units: tuple[int, ...] = ()  # only these; none: all


def embed_file(
    loaded: Checkpoint,
    records: Iterable[Record],
    out: Path,
    *,
    wanted: Wanted | None = None,
    lanes: int = LANES,
    progress: Callable[[int], None] | None = None,
) -> Summary:
    """Writes the representations of a stream of records in their order; memory does not grow with it."""
    wanted = wanted or Wanted()
    files.check(out)
    convention = loaded.convention
    before, after = convention.around
    begun = time.perf_counter()
    with Store(out.parent, _widths(loaded, wanted)) as store:

        def read() -> Iterator[Symbols]:
            for record in records:
                encoded = convention.read(record.text, record.id)
                store.add(record.id, encoded.size - before - after)
                yield encoded

        def keep(record: int, place: int, h: Array) -> None:
            """The text's own positions among those handed over."""
            low, high = store.offset(record), store.offset(record + 1)
            skip = max(0, before - place)
            rows = h[skip : max(skip, high - low + before - place)]
            if len(rows):
                store.put("h", low + place + skip - before, _chosen(rows, wanted))

        for part in embedded(loaded, read(), lanes=lanes, positions=keep if wanted.positions else None):
            _put(store, part, wanted)
            if progress is not None:
                progress(len(part.records))
        if store.count == 0:
            raise DataError("The input holds no record. Check the file and --as.")
        symbols = store.total + store.count * (before + after)
        files.write(store, out)
        return Summary(store.count, symbols, time.perf_counter() - begun)


def require_readable(loaded: Checkpoint, records: Iterable[Record]) -> None:
    """Raises DataError for the first record that the model has no symbols for: better now than at the end."""
    for record in records:
        loaded.convention.read(record.text, record.id)


def require_units(model: LanguageModel, units: Iterable[int]) -> None:
    """Complains about a unit that the model does not have."""
    H = model.recipe.hidden
    if bad := [unit for unit in units if not 0 <= unit < H]:
        raise DataError(f"There is no unit {bad[0]}: the model has {H}. Give units from 0 to {H - 1}.")


def _widths(loaded: Checkpoint, wanted: Wanted) -> dict[str, int]:
    require_units(loaded.model, wanted.units)
    width = len(wanted.units) or loaded.model.recipe.hidden
    c = width if loaded.model.c_width else 0
    each = {"h_mean": width, "h_final": width, "c_final": c, "joined": 2 * width + c, "h": width}
    return {name: each[name] for name in (*wanted.vectors, *["h"] * wanted.positions)}


def _put(store: Store, part: Embedded, wanted: Wanted) -> None:
    vectors = {name: _chosen(getattr(part, name), wanted) for name in ("h_mean", "h_final", "c_final")}
    if "joined" in store.widths:
        vectors["joined"] = np.concatenate(list(vectors.values()), axis=1)
    for name in wanted.vectors:
        for record, row in zip(part.records, vectors[name], strict=True):
            store.put(name, record, row)


def _chosen(rows: Array, wanted: Wanted) -> Array:
    return rows[:, list(wanted.units)] if wanted.units and rows.shape[1] else rows


def _summed(packed: Packed, h: Tensor) -> Tensor:
    """(B, H): the sum of h over the chunk's places that belong to the lane's record."""
    T = packed.x.shape[1]
    if (packed.start >= 0).all():
        return h.sum(dim=1, dtype=torch.float64)
    valid = torch.from_numpy(packed.start[:, None] + np.arange(T) >= 0).to(h.device)
    return h.masked_fill(~valid.unsqueeze(-1), 0).sum(dim=1, dtype=torch.float64)


def _hand_over(packed: Packed, h: Tensor, positions: Callable[[int, int, Array], None]) -> None:
    rows = _array(h)
    for lane, (record, start) in enumerate(zip(packed.record, packed.start.tolist(), strict=True)):
        positions(record, max(0, start), rows[lane, max(0, -start) :])


def _array(tensor: Tensor) -> Array:
    return tensor.float().cpu().numpy()
