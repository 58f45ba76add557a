"""`mulstm evaluate`: what a text costs under a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mulstm import console
from mulstm.cli._options import AsJson, DataDir, Device, Model, PartName, Precision, Quiet
from mulstm.cli._output import Force, require_room
from mulstm.recipe import lanes_for

if TYPE_CHECKING:
    from mulstm.checkpoint import Checkpoint
    from mulstm.data.corpus import Split
    from mulstm.evaluate import Evaluation
    from mulstm.words import WordCosts

REMEDY = "Leave --dynamic out, which wants that text"


def command(
    model: Model,
    text: Annotated[
        str,
        typer.Argument(help="A file, a folder or a known corpus; without it, what the model was trained on."),
    ] = "",
    split: PartName = "",
    lanes: Annotated[
        int | None,
        typer.Option(
            "--lanes",
            min=1,
            help="Stretches the text is read in (default: evaluate.final_lanes of the model's recipe for "
            "its own text, 10 for another, fewer for a short one; dynamic: 1).",
        ),
    ] = None,
    chunk: Annotated[
        int, typer.Option("--chunk", min=1, help="Symbols read at a time; no effect on the result.")
    ] = 200,
    symbols: Annotated[
        int, typer.Option("--symbols", min=0, help="Only so many from the start; 0: all.")
    ] = 0,
    losses: Annotated[
        Path | None,
        typer.Option("--losses", help="Write each symbol's loss in nats, in text order, to this .npy."),
    ] = None,
    words: Annotated[
        bool,
        typer.Option("--words", help="Also multiply the probabilities of each word's bytes and of its end."),
    ] = False,
    force: Force = False,
    precision: Precision = "fp32",
    backend: Annotated[str, typer.Option("--backend", help='See "mulstm info".')] = "auto",
    dynamic: Annotated[
        bool,
        typer.Option("--dynamic", help="Let a copy of the model learn from each segment once it is scored."),
    ] = False,
    segment: Annotated[
        int | None, typer.Option("--segment", min=1, help="Dynamic: symbols between updates (default: 20).")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            min=0,
            help="Dynamic: size of an update (default: 40 / parameters, within 2e-6 and 1e-4; with none of "
            "these options, all are the recipe's, if it has a rate).",
        ),
    ] = None,
    pull: Annotated[
        float | None,
        typer.Option("--pull", min=0, help="Dynamic: pull back to the trained weights (default: 1e-3)."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", min=0, help="Dynamic: added to the scale (default: 1e-5).")
    ] = None,
    as_trained: Annotated[
        bool,
        typer.Option("--as-trained", help="Dynamic: move weight norm's rows and gains, not the matrices."),
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record", help="Dynamic: write what the test part costs into this record of the model."
        ),
    ] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model in bits per character.

    Where the corpus has words, in word perplexity, too.
    """
    from mulstm import adapt, checkpoint, files, parallel
    from mulstm.cli._text import is_own, part_of
    from mulstm.data.known import recounted
    from mulstm.dynamic import Settings, evaluate_dynamic, got_worse
    from mulstm.evaluate import evaluate
    from mulstm.interop.npz import write_npy
    from mulstm.report.records import add_dynamic

    options = {"segment": segment, "rate": rate, "pull": pull, "epsilon": epsilon}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    asked = Settings(**given) if given else None
    if dynamic and lanes not in (None, 1):
        raise typer.BadParameter("with --dynamic a text is read in one stretch", param_hint="--lanes")
    if not dynamic and (as_trained or given):
        raise typer.BadParameter(
            "--segment, --rate, --pull, --epsilon and --as-trained go with it only", param_hint="--dynamic"
        )
    if record is not None and (not dynamic or text or split not in ("", "test") or symbols):
        raise typer.BadParameter(
            "a record takes --dynamic on the whole test part only", param_hint="--record"
        )
    require_room(losses, force, read=(text, model), endings=(".npy",))
    file = checkpoint.find(model)  # once: a folder of runs may soon stand for another
    loaded = checkpoint.load(file, parallel.pick(device))
    loaded.require_head()
    loaded.model.precision, loaded.model.backend = precision, backend
    own = is_own(loaded, text)
    nameless = f"{REMEDY}, and give a text by name." if dynamic and not text else ""
    part = part_of(loaded, text, own, split, data_dir, remedy=nameless)
    total = min(symbols or part.symbols_count, part.symbols_count)
    if dynamic:
        if record is not None:
            files.require_place(record)
            adapt.require_record_of(loaded, part, record)
        trained = part_of(loaded, text if own else "", True, "train", data_dir, remedy=f"{REMEDY}.")
        moved = adapt.prepare(loaded, asked, trained, folded=not as_trained, quiet=quiet)
        lanes, how = 1, (moved.model, part, moved.statistics, moved.settings)
        found = _watched(total, quiet, partial(evaluate_dynamic, *how, symbols=symbols))
        if found.losses is not None and got_worse(found.losses):
            console.note(
                "warning: the text's end costs more than twice its beginning, so learning may have spoilt "
                f"the model. Compare with --rate 0 --pull 0, or try less than --rate {moved.facts['rate']:g}."
            )
    else:
        keep = losses or words
        lanes = lanes or (loaded.recipe.evaluate.final_lanes if own else lanes_for(total))
        measure = partial(evaluate, loaded.model, part, lanes, chunk, symbols=symbols, losses=keep)
        found = _watched(total, quiet, measure)
    found.require_number(precision)
    costs = _word_costs(part, found) if words else None
    counts = recounted(part.corpus, part.name, found.symbols)
    if as_json:
        result = _facts(model, file, loaded, part, found, lanes)
        if dynamic:
            result["dynamic"] = moved.facts
        if words:
            result["by_words"] = costs and {"perplexity": costs.perplexity} | asdict(costs)
        if counts:
            result["by_protocol"] = _by_protocol(found, counts)
        console.result_json(result)
    else:
        console.result(_told(part, found) + (", dynamic" if dynamic else ""))
        if words:
            console.result(_told_of_words(costs))
        if counts:
            console.result(_told_of_protocols(found, counts))
    # Last, so that a full disk does not take the figures with it.
    if dynamic and losses is not None and found.losses is not None:
        write_npy(losses, found.losses)
    if record is not None:
        add_dynamic(record, adapt.for_record(found, moved, loaded))


def _word_costs(part: Split, found: Evaluation) -> WordCosts | None:
    from mulstm.words import word_costs

    assert found.losses is not None
    return word_costs(part.text.read(part.start, part.start + found.symbols).tobytes(), found.losses)


def _facts(
    model: Path, file: Path, loaded: Checkpoint, part: Split, found: Evaluation, lanes: int
) -> dict[str, Any]:
    """For --json."""
    return {
        "model": str(model),
        "file": str(file),
        "fingerprint": loaded.meta["fingerprint"],
        "corpus": part.corpus,
        "split": part.name,
        "bits_per_char": found.bits_per_char,
        "nats": found.nats,
        "symbols": found.symbols,
        "words": found.words,
        "word_perplexity": found.word_perplexity,
        "lanes": min(lanes, found.symbols),
        "precision": loaded.model.precision,
        "seconds": found.seconds,
        "symbols_per_second": found.symbols / found.seconds,
    }


def _told(part: Split, found: Evaluation) -> str:
    line = f"{found.bits_per_char:.4f} bits/char on {console.counted(found.symbols, 'symbol')}"
    line += f" of {console.in_line(part.corpus)} ({part.name})"
    if found.words:
        perplexity = console.decimal(found.word_perplexity, 2)
        line += f", word perplexity {perplexity} on {found.words:,} words"
    return line


def _told_of_words(costs: WordCosts | None) -> str:
    from mulstm.units import bits

    if costs is None:
        return "there are no words in it"
    perplexity = console.decimal(costs.perplexity, 2)
    line = f"word perplexity {perplexity} by the bytes of {costs.count:,} words and newlines"
    if costs.spaces:
        each = bits(costs.spaces_nats) / costs.spaces
        line += f", without the {costs.spaces:,} other spaces ({each:.3f} bits each)"
    return line


def _by_protocol(found: Evaluation, counts: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """The same cost by each count."""
    from mulstm.units import bits_per_char

    return {p: {"symbols": n, "bits_per_char": bits_per_char(found.nats, n)} for p, n in counts.items()}


def _told_of_protocols(found: Evaluation, counts: Mapping[str, int]) -> str:
    own, *others = _by_protocol(found, counts).items()
    told = (f"{by['bits_per_char']:.4f} by {name} ({by['symbols']:,} symbols)" for name, by in others)
    return f"counted by the {own[0]} protocol; the same cost is {', '.join(told)}"


def _watched(total: int, quiet: bool, measure: Callable[..., Evaluation]) -> Evaluation:
    """What `measure` finds, with a progress line over `total` symbols unless nobody wants one."""
    if quiet:
        return measure()
    with console.Progress(total, label="evaluate", warm_up=1) as screen:
        return measure(progress=lambda done, bits: screen.update(done, bits_per_char=bits))
