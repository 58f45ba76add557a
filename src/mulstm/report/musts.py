"""What the GPU is asked to reach, beside what the rows of a benchmark show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]
CELLS = ("lstm", "lstm, 2 layers", "milstm", "mlstm, initial unit")
HEAD = ("work", "must", "goal", "measured", "met", "goal met")
FORMATS: dict[str, Callable[[float], str]] = {
    "x": lambda value: f"{value:.2f} x",
    "symbols/s": lambda value: f"{value / 1e6:.2f} M/s" if value >= 1e5 else f"{value / 1e3:.1f} k/s",
    "s": lambda value: f"{value:.2f} s",
    "%": lambda value: f"{value:.0f} %",
    "bits": lambda value: f"{value:.4f} bits",
}


def table(rows: Sequence[Row], losses: dict[str, Any] | None) -> list[Row]:
    """One object for each thing asked for: work, unit, must, goal, measured, met, goal_met.

    What the rows do not show is null, and neither met nor missed.
    """
    parts = (_layers, _updates, _streams, _errors, _cells)
    return [line for part in parts for line in part(rows)] + [_losses(losses)]


def _line(
    work: str,
    unit: str,
    must: float | None,
    goal: float | None,
    measured: float | None,
    *,
    most: bool = False,
) -> Row:
    """`most`: the limits are not to be exceeded."""

    def reached(limit: float | None) -> bool | None:
        if limit is None or measured is None:
            return None
        return measured <= limit if most else measured >= limit

    return {
        "work": work,
        "unit": unit,
        "must": must,
        "goal": goal,
        "at_most": most,
        "measured": None if measured is None else float(f"{measured:.4g}"),
        "met": reached(must),
        "goal_met": reached(goal),
    }


def _layers(rows: Sequence[Row]) -> Iterator[Row]:
    at = {"level": "layer", "lanes": 128, "chunk": 200}
    for H, same, equal, goal in ((1900, 2.0, 1.0, 1.5), (2800, None, 1.0, 1.4)):
        ours = _best(rows, name="mlstm", hidden=H, **at)
        size = f"forward and backward, hidden {H}, 128 x 200: times as fast as cuDNN's LSTM"
        title = f"layer in a graph, {size}"
        for backend, how in (("cudnn", "as it comes"), ("cudnn, one graph", "in a graph")):
            if same:
                other = _best(rows, name="nn.LSTM", hidden=H, backend=backend, **at)
                yield _line(f"{title} of the same hidden size, {how}", "x", same, None, _ratio(ours, other))
            other = _equal(rows, H, backend=backend, **at)
            yield _line(f"{title} of equal parameters, {how}", "x", equal, goal, _ratio(ours, other))
        plain = _best(rows, name="mlstm", backend="triton, nn.MultiplicativeLSTM", hidden=H, **at)
        work = f"nn.MultiplicativeLSTM without a graph, {size} of equal parameters, as it comes"
        yield _line(work, "x", None, None, _ratio(plain, _equal(rows, H, backend="cudnn", **at)))


def _updates(rows: Sequence[Row]) -> Iterator[Row]:
    sizes = ((1900, 256, 100, 3.2e6, 4.5e6), (2800, 256, 100, 1.8e6, 2.3e6), (450, 128, 200, 8e6, 15e6))
    for H, B, T, must, goal in sizes:
        at = {"level": "update", "hidden": H, "lanes": B, "chunk": T}
        ours = _best(rows, name="mlstm", **at)
        title = f"full update, hidden {H}, {B} x {T}"
        yield _line(title, "symbols/s", must, goal, _speed(ours))
        if H == 1900:
            naive = _best(rows, name="naive", **at)
            yield _line(f"{title}: times as fast as the naive loop", "x", 15.0, None, _ratio(ours, naive))


def _streams(rows: Sequence[Row]) -> Iterator[Row]:
    ours = _best(rows, name="mlstm", level="evaluate", hidden=2800, lanes=500)
    seconds = 5e6 / ours["symbols_per_second"] if ours else None
    yield _line("evaluation, hidden 2800, 500 lanes, 5 M symbols", "s", 1.5, 0.9, seconds, most=True)
    ours = _best(rows, name="mlstm", level="sample", hidden=2800, lanes=1)
    yield _line("sampling one stream, hidden 2800", "symbols/s", 12e3, 25e3, _speed(ours))


def _errors(rows: Sequence[Row]) -> Iterator[Row]:
    for level, H, B, T in (("layer", 1900, 128, 200), ("layer", 2800, 128, 200), ("update", 1900, 256, 100)):
        at = {"level": level, "lanes": B, "chunk": T}
        ours, other = _best(rows, name="mlstm", hidden=H, **at), _equal(rows, H, **at)
        errors = [row["error_vs_float64"] if row else None for row in (ours, other)]
        share = errors[0] / errors[1] if errors[0] and errors[1] else None
        work = f"gradient error against float64, {level}, hidden {H}: times that of cuDNN's LSTM"
        yield _line(work, "x", 1.0, None, share, most=True)


def _cells(rows: Sequence[Row]) -> Iterator[Row]:
    at = {"level": "update", "lanes": 256, "chunk": 100}
    ours = _best(rows, name="mlstm", hidden=1900, **at)
    for name in CELLS:
        cell = _best(rows, name=name, **at)
        share = 100 * _throughput(cell) / _throughput(ours) if cell and ours else None
        size = f" of hidden {cell['hidden']}" if cell else ""
        work = f"full update, {name}{size}, 256 x 100: share of the mLSTM's symbols/s x parameters"
        yield _line(work, "%", 60.0, None, share)


def _losses(losses: dict[str, Any] | None) -> Row:
    agreement = losses["agreement"] if losses else {}
    apart = agreement.get("held_out_difference_bits")
    return _line(
        "a short training run: distance from reference in fp32, held out; at most the range of three seeds",
        "bits",
        agreement.get("held_out_range_of_seeds_bits"),
        None,
        None if apart is None else abs(apart),
        most=True,
    )


def cells(musts: Sequence[Row]) -> list[list[str]]:
    """The table's body, for people."""

    def limit(one: Row, key: str) -> str:
        if one[key] is None:
            return "–"
        return ("at most " if one["at_most"] else "") + FORMATS[one["unit"]](one[key])

    def word(met: bool | None) -> str:
        return "–" if met is None else "yes" if met else "no"

    return [
        [
            one["work"],
            limit(one, "must"),
            limit(one, "goal"),
            "not measured" if one["measured"] is None else FORMATS[one["unit"]](one["measured"]),
            word(one["met"]),
            word(one["goal_met"]),
        ]
        for one in musts
    ]


def _best(rows: Sequence[Row], **wanted: Any) -> Row | None:
    """The fastest row that has all of these."""
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    return max(found, key=lambda row: float(row["symbols_per_second"])) if found else None


def _equal(rows: Sequence[Row], H: int, **wanted: Any) -> Row | None:
    """The LSTM with as many parameters as ours of hidden size H."""
    near = [row for row in rows if H < row["hidden"] < 1.2 * H]
    return _best(near, name="nn.LSTM equal parameters", **wanted)


def _speed(row: Row | None) -> float | None:
    return None if row is None else float(row["symbols_per_second"])


def _ratio(a: Row | None, b: Row | None) -> float | None:
    return a["symbols_per_second"] / b["symbols_per_second"] if a and b else None


def _throughput(row: Row) -> float:
    return float(row["symbols_per_second"] * row["parameters"])
