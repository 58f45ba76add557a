"""A recipe is the whole of a run: what is not in it, or on the command line, did not happen."""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

from mulstm.errors import RecipeError

CELLS = ("rnn", "tensor-rnn", "mrnn", "lstm", "milstm", "mlstm")


@dataclass(frozen=True)
class ModelRecipe:
    """The function: cell, sizes, wiring."""

    cell: str = "mlstm"  # one of CELLS
    unit: str = "standard"  # LSTM-type cells: standard | initial | initial-text
    hidden: int = 512  # H
    layers: int = 1
    skip: bool = False  # input to every layer, every layer to the softmax
    embedding: int = 0  # E; 0 is one-hot input
    weight_norm: bool = False  # on all input and recurrent matrices, one gain per output row
    output_bias: bool = True
    learn_b_h: bool = True  # "initial" unit: whether the bias inside the last tanh is trained


@dataclass(frozen=True)
class InitRecipe:
    """Where the parameters start."""

    recurrent: str = "orthogonal"  # orthogonal | gaussian: W_mh and W_zm
    recurrent_scale: float = 1.0
    input: str = "orthogonal"  # W_mx and W_zx
    input_scale: float = 1.0
    lower: str = "orthogonal"  # from the layer below, where skip wiring makes it a matrix of its own
    lower_scale: float = 1.0
    output: str = "orthogonal"
    output_scale: float = 1.0
    embedding_range: float = 0.2  # uniform in (-r, r)
    forget_bias: float = 3.0
    output_gate_bias: float = 0.0
    alpha: float = 1.0  # MI-LSTM's three vectors
    beta: float = 0.5


@dataclass(frozen=True)
class DropoutRecipe:
    """Variational dropout: one mask per lane, shared over a chunk."""

    embedding: float = 0.0
    hidden: float = 0.0  # the masked h goes to the output and to the next step
    output: float = 0.0  # on the softmax input only
    weights: float = 0.0  # DropConnect on the recurrent matrices, one mask per chunk


@dataclass(frozen=True)
class DataRecipe:
    """Which text, cut how."""

    corpus: str = "python"  # a known name, a file or a folder
    alphabet: str = "bytes"  # bytes (256) | corpus (the sorted distinct bytes of the whole corpus)
    #   and for records: protein (UniRep's 26 tokens) | padded-bytes (257)
    split: str = ""  # train-valid-test, e.g. "90-5-5", or "95-0-5"; empty: the corpus's own
    protocol: str = ""  # corpora with several in use (ptb); empty: the corpus's default
    records: str = ""  # fasta | lines | jsonl | csv: a file of texts, each for itself; empty: one text
    column: str = ""  # jsonl and csv: the field with the text; empty: sequence or text
    convention: str = ""  # how foreign models write a record: protein | openai-review | nvidia-review


@dataclass(frozen=True)
class OptimiserRecipe:
    """How a gradient becomes an update."""

    name: str = "adam"  # adam | adamw | rmsprop-normalised
    rate: float = 1e-3  # for rmsprop-normalised: the length of the update
    floor: float = 0.0  # the rate never falls below it
    decay: str = "linear"  # constant | linear | cosine (over decay_updates) | exponential
    decay_updates: int = 0  # 0: the whole run
    decay_factor: float = 0.9999  # exponential: the rate is multiplied by it before each update
    warmup: int = 0  # updates of linear growth
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.0  # largest norm of the whole gradient; 0: none


@dataclass(frozen=True)
class TrainRecipe:
    """The loop."""

    lanes: int = 32  # B
    chunk: int = 100  # T
    epochs: float = 1.0
    updates: int = 0  # when > 0, instead of epochs
    seed: int = 1
    precision: str = "fp32"  # fp32 | bf16 (fp32 master weights and cell state)
    backend: str = "auto"
    block: int = 0  # symbols of a block cut into lanes by itself ("megabatch"); 0: the whole split
    clear_every: int = 0  # updates after which all states go to zero
    drop_state: float = 0.0  # chance per lane and chunk that its state goes to zero
    refresh: bool = False  # re-run a chunk with the new weights before carrying its state on
    rotate: bool = False  # each epoch starts at another offset
    ema: float = 0.0  # decay of the averaged weights; 0: none
    ema_start: float = 0.2  # share of the run after which averaging starts
    save_every: float = 300.0  # seconds between checkpoints


@dataclass(frozen=True)
class EvaluateRecipe:
    """When and how validation is read."""

    every: int = 0  # updates between validations; 0: ten times a run
    symbols: int = 500_000  # of the validation split read each time; 0: all
    lanes: int = 100  # during training
    patience: int = 0  # validations without a gain before the run stops; 0: never. Keeps the best model
    final_lanes: int = 10  # for the numbers of the record


@dataclass(frozen=True)
class Recipe:
    """A run, whole."""

    name: str = ""
    title: str = ""
    table: str = ""  # hutter | text8 | wikitext2 | ptb, for rows of the paper
    row: str = ""
    kind: str = ""  # faithful | fast, for rows of the paper
    paper: float = 0.0  # what the paper reports, bits/char (0: nothing)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    init: InitRecipe = field(default_factory=InitRecipe)
    dropout: DropoutRecipe = field(default_factory=DropoutRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    optimiser: OptimiserRecipe = field(default_factory=OptimiserRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)
    evaluate: EvaluateRecipe = field(default_factory=EvaluateRecipe)


SECTIONS: dict[str, type] = {
    name: kind
    for name, kind in get_type_hints(Recipe).items()
    if name not in ("name", "title", "table", "row", "kind", "paper")
}
# What `fit` aims at for a text of any length.
FEWEST_UPDATES, MOST_UPDATES = 2_000, 50_000
PACKAGED = Path(__file__).parent / "recipes"
Table = dict[str, Any]


def _known_keys() -> dict[str, type]:
    """Every key, dotted, with its type: {"name": str, "model.cell": str, ...}."""
    keys = {name: kind for name, kind in get_type_hints(Recipe).items() if name not in SECTIONS}
    for section, kind in SECTIONS.items():
        keys |= {f"{section}.{name}": of for name, of in get_type_hints(kind).items()}
    return keys


KEYS = _known_keys()

# What values may be: the keys, a test, and the words that follow "must be".
Rule = tuple[str, Callable[[Any], bool], str]


def _choice(key: str, *allowed: str) -> Rule:
    return key, lambda v: v in allowed, "one of " + ", ".join(a or '""' for a in allowed)


RULES: tuple[Rule, ...] = (
    _choice("table", "", "hutter", "text8", "wikitext2", "ptb"),
    _choice("kind", "", "faithful", "fast"),
    _choice("model.cell", *CELLS),
    _choice("model.unit", "standard", "initial", "initial-text"),
    _choice("init.recurrent init.input init.lower init.output", "orthogonal", "gaussian"),
    _choice("data.alphabet", "bytes", "corpus", "protein", "padded-bytes"),
    _choice("data.records", "", "fasta", "lines", "jsonl", "csv"),
    _choice("data.convention", "", "protein", "openai-review", "nvidia-review"),
    _choice("optimiser.name", "adam", "adamw", "rmsprop-normalised"),
    _choice("optimiser.decay", "constant", "linear", "cosine", "exponential"),
    _choice("train.precision", "fp32", "bf16"),
    ("name", lambda v: not re.search(r"^/|^\.\.?(/|$)|/\.\.?(/|$)|\0", v), "a name that can name a folder"),
    ("data.corpus train.backend", lambda v: v != "", "given"),
    ("data.split", lambda v: v == "" or parse_split(v) is not None, 'three shares of 100 such as "90-5-5"'),
    ("model.hidden model.layers train.lanes train.chunk", lambda v: v >= 1, "1 or more"),
    ("evaluate.lanes evaluate.final_lanes", lambda v: v >= 1, "1 or more"),
    ("optimiser.rate train.epochs train.save_every", lambda v: v > 0, "above 0"),
    ("optimiser.decay_factor", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("dropout.embedding dropout.hidden dropout.output dropout.weights", lambda v: 0 <= v < 1, "in [0, 1)"),
    ("optimiser.beta1 optimiser.beta2 train.drop_state", lambda v: 0 <= v < 1, "in [0, 1)"),
    ("train.ema train.ema_start", lambda v: 0 <= v < 1, "in [0, 1)"),
    (
        "paper model.embedding init.recurrent_scale init.input_scale init.lower_scale init.output_scale"
        " init.embedding_range optimiser.floor optimiser.decay_updates optimiser.warmup optimiser.epsilon"
        " optimiser.weight_decay optimiser.clip train.updates train.seed train.block train.clear_every"
        " evaluate.every evaluate.symbols evaluate.patience",
        lambda v: v >= 0,
        "0 or more",
    ),
)


def parse_split(text: str) -> tuple[Fraction, Fraction, Fraction] | None:
    """The shares of train, valid and test; None when the text does not say three that make 100."""
    if not re.fullmatch(r"\d+(\.\d+)?(-\d+(\.\d+)?){2}", text):
        return None
    train, valid, test = (Fraction(part) / 100 for part in text.split("-"))
    return (train, valid, test) if train + valid + test == 1 and train > 0 else None


def names() -> list[str]:
    """The packaged recipes, sorted."""
    return sorted(p.relative_to(PACKAGED).with_suffix("").as_posix() for p in PACKAGED.rglob("*.toml"))


def load(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A packaged recipe by its name, or one of the user's by its path, with `section.key=value` on top."""
    path, name = _find(name_or_path)
    table = _read(path, ())
    table.setdefault("name", name)
    faults: list[str] = []
    for override in overrides:
        _override(table, override, faults)
    return from_dict(table, source=f"recipe {name_or_path}", faults=faults)


def for_text(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The default recipe for a user's own file or folder."""
    recipe = load("text", overrides)
    return replace(recipe, data=replace(recipe.data, corpus=str(path)))


def fit(recipe: Recipe, symbols: int, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe made to suit a training text of so many symbols; what `overrides` name stays.

    Where the text is short, fewer lanes, then shorter chunks (a lane holds at least eight, so that carried
    state means something), and more epochs; where it is long, no more updates than a day will do.
    """
    given = {text.partition("=")[0].strip() for text in overrides}
    train, warmup = recipe.train, recipe.optimiser.warmup
    if not given & {"train.lanes", "train.chunk"}:
        chunk = max(1, min(train.chunk, symbols // 8))
        train = replace(train, chunk=chunk, lanes=max(1, min(train.lanes, symbols // (8 * chunk))))
    if not given & {"train.epochs", "train.updates"}:
        epoch = max(1, symbols // (train.lanes * train.chunk))
        epochs = min(max(train.epochs, FEWEST_UPDATES / epoch), 4 * train.epochs, MOST_UPDATES / epoch)
        train = replace(train, epochs=epochs)
        warmup = min(warmup, int(epochs * epoch) // 10)
    optimiser = recipe.optimiser if "optimiser.warmup" in given else replace(recipe.optimiser, warmup=warmup)
    return replace(recipe, train=train, optimiser=optimiser)


def as_dict(recipe: Recipe) -> Table:
    """Plain nested dictionaries, ready for JSON."""
    return asdict(recipe)


def from_dict(table: Table, *, source: str = "recipe", faults: Sequence[str] = ()) -> Recipe:
    """The recipe such a dictionary describes; every fault in it is told at once."""
    found = list(faults)
    top: Table = {}
    for key, value in table.items():
        if key in SECTIONS:
            if isinstance(value, dict):
                top[key] = SECTIONS[key](**_section(key, value, found))
            else:
                found.append(f"{key} = {_show(value)} must be a table: write [{key}] and its keys below")
        elif key in KEYS:
            _take(key, key, value, top, found)
        else:
            found.append(_unknown(key))
    recipe = Recipe(**top)
    _report(source, found + _faults(recipe))
    return recipe


def check(recipe: Recipe) -> None:
    """Raises RecipeError, naming every impossible value."""
    _report(f"recipe {recipe.name}".rstrip(), _faults(recipe))


def dumps(recipe: Recipe) -> str:
    """TOML that loads back equal."""
    lines: list[str] = []
    for key, value in as_dict(recipe).items():
        if key in SECTIONS:
            lines += ["", f"[{key}]", *(f"{k} = {_show(v)}" for k, v in value.items())]
        else:
            lines.append(f"{key} = {_show(value)}")
    return "\n".join(lines) + "\n"


def _find(name_or_path: str | Path) -> tuple[Path, str]:
    """The file, and the name the recipe goes by."""
    text = str(name_or_path)
    if text.endswith(".toml"):
        if not Path(text).is_file():
            raise RecipeError(f"There is no recipe file {text}. {_nearest_recipes(text)}")
        return Path(text), Path(text).stem
    if text in names():
        return PACKAGED / f"{text}.toml", text
    raise RecipeError(f'There is no recipe called "{text}". {_nearest_recipes(text)}')


def _nearest_recipes(text: str) -> str:
    near = difflib.get_close_matches(text.removesuffix(".toml"), names(), n=3, cutoff=0.4)
    return (f"Did you mean {' or '.join(near)}? " if near else "") + '"mulstm recipes" lists them all.'


def _read(path: Path, seen: tuple[Path, ...]) -> Table:
    """The file's table laid over that of the recipe it is `like`."""
    if path in seen:
        chain = " -> ".join(p.stem for p in (*seen, path))
        raise RecipeError(f"Recipes are like one another in a circle: {chain}. Remove a `like` line.")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path} cannot be read ({error.strerror}). Check the file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not TOML: {error}. Mend that line.") from None
    like = table.pop("like", None)
    if like is None:
        return table
    if not isinstance(like, str):
        raise RecipeError(f'{path}: like = {_show(like)} must be a recipe\'s name. Write like = "text".')
    beside = path.parent / like
    base = _read(beside if like.endswith(".toml") and beside.is_file() else _find(like)[0], (*seen, path))
    base.pop("name", None)
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            base[key] = base[key] | value
        else:
            base[key] = value
    return base


def _override(table: Table, override: str, faults: list[str]) -> None:
    key, equals, text = (part.strip() for part in override.partition("="))
    if not equals:
        faults.append(f'"{override}" must be of the form section.key=value')
    elif key not in KEYS:
        faults.append(_unknown(key))
    else:
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            value = text
        section, _, name = key.rpartition(".")
        # A corpus may well be called 1984: text keys take the words as they stand.
        value = text if KEYS[key] is str and not isinstance(value, str) else value
        target = table.setdefault(section, {}) if section else table
        if isinstance(target, dict):
            target[name] = value


def _section(section: str, table: Table, faults: list[str]) -> Table:
    taken: Table = {}
    for name, value in table.items():
        key = f"{section}.{name}"
        if key in KEYS:
            _take(key, name, value, taken, faults)
        else:
            faults.append(_unknown(key))
    return taken


def _take(key: str, name: str, value: Any, into: Table, faults: list[str]) -> None:
    """Puts the value where it belongs, or says why not. Whole numbers will do for real ones."""
    kind: Any = KEYS[key]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}
        faults.append(f"{key} = {_show(value)} must be {words[kind]}")
    elif kind is float and not math.isfinite(value):
        faults.append(f"{key} = {value} must be a finite number")
    else:
        into[name] = value


def _unknown(key: str) -> str:
    """What to say of a key nobody knows: the nearest one, also when it stands in the wrong section."""
    last = key.rpartition(".")[2]
    near = [k for k in KEYS if k.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(key, KEYS, n=1, cutoff=0)
    return f"unknown key {key}: did you mean {' or '.join(near)}?"


def _faults(recipe: Recipe) -> list[str]:
    faults = []
    for keys, allowed, words in RULES:
        for key in keys.split():
            section, _, name = key.rpartition(".")
            value = getattr(getattr(recipe, section) if section else recipe, name)
            if not allowed(value):
                faults.append(f"{key} = {_show(value)} must be {words}")
    return faults + _contradictions(recipe)


def _contradictions(recipe: Recipe) -> list[str]:
    """Values that are each possible, but not together."""
    model, dropout, data, train = recipe.model, recipe.dropout, recipe.data, recipe.train
    rnn = model.cell in ("rnn", "tensor-rnn", "mrnn")
    shares = parse_split(data.split)
    rules = [
        (rnn and model.unit != "standard", f"model.unit must stay standard for {model.cell}"),
        (dropout.embedding > 0 and model.embedding == 0, "dropout.embedding needs model.embedding above 0"),
        (model.skip and model.layers == 1, "model.skip needs model.layers of 2 or more"),
        (
            0 < train.block < train.lanes * train.chunk,
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
        (
            recipe.evaluate.patience > 0 and shares is not None and shares[1] == 0,
            f'evaluate.patience needs a validation part, and data.split = "{data.split}" has none',
        ),
        (
            recipe.optimiser.floor > recipe.optimiser.rate,
            f"optimiser.floor = {recipe.optimiser.floor} must not be above optimiser.rate",
        ),
    ]
    return [words for wrong, words in rules if wrong]


def _report(source: str, faults: list[str]) -> None:
    if faults:
        count = "a fault" if len(faults) == 1 else f"{len(faults)} faults"
        listed = "\n".join(f"  {fault}" for fault in faults)
        raise RecipeError(f"{source} has {count}:\n{listed}\ndocs/recipes.md explains every key.")


def _show(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
