"""What values of a recipe are possible, alone and together."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from mulstm.recipe.schema import CELLS, CONVENTIONS, KEYS, LSTM_TYPE, UNITS, Recipe

DEEPEST = 3  # parts of a name, as hutter/size/mlstm-3m has: so deep are folders of runs looked for
# What values may be: the keys, a test, and the words that follow "must be".
Rule = tuple[str, Callable[[Any], bool], str]


def _choice(key: str, *allowed: str) -> Rule:
    return key, lambda v: v in allowed, "one of " + ", ".join(a or '""' for a in allowed)


def _each(kind: type) -> str:
    return " ".join(key for key, of in KEYS.items() if of is kind)


def _is_unicode(text: str) -> bool:
    """Not so for a file's name that is no UTF-8: no recipe.toml could hold it."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


# What single precision and 64 bits hold, with room to reckon.
BOUNDS: tuple[Rule, ...] = (
    (_each(float), lambda v: abs(v) <= 1e30, "a number of at most 1e30"),
    (_each(int), lambda v: abs(v) < 1 << 63, "below 2**63"),
    (_each(str), _is_unicode, "UTF-8 (rename a file whose name is not)"),
)
RULES: tuple[Rule, ...] = (
    _choice("table", "", "hutter", "text8", "wikitext2", "ptb"),
    _choice("kind", "", "faithful", "fast"),
    _choice("model.cell", *CELLS),
    _choice("model.unit", *UNITS),
    _choice("init.recurrent", "orthogonal", "orthogonal-blocks", "gaussian"),
    _choice("init.input init.lower init.output", "orthogonal", "gaussian"),
    _choice("data.alphabet", "bytes", "corpus", "protein", "padded-bytes"),
    _choice("data.records", "", "fasta", "lines", "jsonl", "csv"),
    _choice("data.convention", *CONVENTIONS),
    _choice("optimiser.name", "adam", "adamw", "rmsprop-normalised"),
    _choice("optimiser.decay", "constant", "linear", "cosine", "exponential"),
    _choice("train.precision", "fp32", "bf16", "fp8"),
    ("name", lambda v: not re.search(r"^/|^\.\.?(/|$)|/\.\.?(/|$)", v), "a name that can name a folder"),
    ("name", lambda v: v.count("/") < DEEPEST, f"a name of at most {DEEPEST} parts"),
    ("name title", lambda v: not re.search(r"[\0-\x1f\x7f-\x9f]", v), "free of control characters"),
    ("data.corpus train.backend", lambda v: v != "", "given"),
    ("data.split", lambda v: v == "" or parse_split(v) is not None, 'three shares of 100 such as "90-5-5"'),
    ("model.layers", lambda v: 1 <= v <= 1000, "1 to 1,000"),
    ("model.hidden", lambda v: 1 <= v <= 1 << 20, "1 to 1,048,576"),
    ("model.embedding", lambda v: 0 <= v <= 1 << 20, "0 to 1,048,576"),
    ("train.lanes train.chunk dynamic.segment", lambda v: v >= 1, "1 or more"),
    ("evaluate.lanes evaluate.final_lanes", lambda v: v >= 1, "1 or more"),
    ("optimiser.rate optimiser.epsilon train.epochs train.save_every", lambda v: v > 0, "above 0"),
    ("optimiser.decay_factor", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("dropout.embedding dropout.hidden dropout.output dropout.weights", lambda v: 0 <= v < 1, "in [0, 1)"),
    ("optimiser.beta1 optimiser.beta2 train.drop_state", lambda v: 0 <= v < 1, "in [0, 1)"),
    ("train.ema train.ema_start", lambda v: 0 <= v < 1, "in [0, 1)"),
    (
        "paper init.recurrent_scale init.input_scale init.lower_scale init.output_scale"
        " init.embedding_range optimiser.floor optimiser.decay_updates optimiser.warmup"
        " optimiser.weight_decay optimiser.clip train.updates train.seed train.block train.clear_every"
        " evaluate.every evaluate.symbols evaluate.patience dynamic.rate dynamic.pull dynamic.epsilon",
        lambda v: v >= 0,
        "0 or more",
    ),
)


def parse_split(text: str) -> tuple[Fraction, Fraction, Fraction] | None:
    """The shares of train, valid and test; None when the text does not say three that make 100."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,99})?(-\d{1,9}(\.\d{1,99})?){2}", text):
        return None
    train, valid, test = (Fraction(part) / 100 for part in text.split("-"))
    return (train, valid, test) if train + valid + test == 1 and train > 0 else None


def faults(recipe: Recipe, is_fitted: bool = True) -> list[str]:
    """All of them; before a recipe is fitted to its text, its lanes may still become fewer."""
    found = []
    for keys, allowed, words in (*BOUNDS, *RULES):
        for key in keys.split():
            section, _, name = key.rpartition(".")
            value = getattr(getattr(recipe, section) if section else recipe, name)
            if not allowed(value):
                found.append(f"{key} = {quoted(value)} must be {words}")
    return found + _contradictions(recipe, is_fitted)


def _contradictions(recipe: Recipe, is_fitted: bool) -> list[str]:
    """Values that are each possible, but not together."""
    model, dropout, data, train = recipe.model, recipe.dropout, recipe.data, recipe.train
    rnn = model.cell in CELLS and model.cell not in LSTM_TYPE
    shares = parse_split(data.split)
    is_unseen = shares is not None and shares[1] == 0
    wants = f'needs a validation part, and data.split = "{data.split}" has none'
    rules = [
        (rnn and model.unit != "standard", f"model.unit must stay standard for {model.cell}"),
        (dropout.embedding > 0 and model.embedding == 0, "dropout.embedding needs model.embedding above 0"),
        (model.skip and model.layers == 1, "model.skip needs model.layers of 2 or more"),
        (
            is_fitted and 0 < train.block < train.lanes * train.chunk,
            f"train.block = {train.block} must hold {train.lanes} lanes of {train.chunk} symbols",
        ),
        (train.block > 0 and train.rotate, "train.rotate and train.block do not go together"),
        (bool(data.records) and train.block > 0, "train.block is for one text, not for data.records"),
        (
            bool(data.records) and data.alphabet == "corpus",
            'data.records needs data.alphabet = "bytes", "protein" or "padded-bytes"',
        ),
        (
            not data.records and bool(data.convention + data.column),
            "data.convention and data.column need data.records",
        ),
        (
            not data.records and data.alphabet in ("protein", "padded-bytes"),
            f'data.alphabet = "{data.alphabet}" needs data.records',
        ),
        (
            (data.convention == "protein") != (data.alphabet == "protein"),
            'data.convention = "protein" and data.alphabet = "protein" go together',
        ),
        (is_unseen and recipe.evaluate.patience > 0, f"evaluate.patience {wants}"),
        (is_unseen and recipe.evaluate.calibrate, f"evaluate.calibrate {wants}"),
        (
            recipe.optimiser.floor > recipe.optimiser.rate,
            f"optimiser.floor = {recipe.optimiser.floor} must not be above optimiser.rate",
        ),
        (
            recipe.optimiser.weight_decay > 0 and recipe.optimiser.name == "rmsprop-normalised",
            "optimiser.weight_decay is for adamw and adam, and must be 0 for rmsprop-normalised",
        ),
    ]
    return [words for wrong, words in rules if wrong]


def quoted(value: Any) -> str:
    """The start of a value, as much as an error has room for."""
    try:
        text = show(value)
    except (ValueError, RecursionError):  # numbers of more than 4,300 digits, tables in tables in tables
        return "..."
    return text if len(text) <= 100 else text[:80] + "..."


def show(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
