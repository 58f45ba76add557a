"""Every key of a recipe, its type, its default and what it means."""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass
from typing import Any, get_type_hints

CELLS = ("rnn", "tensor-rnn", "mrnn", "lstm", "milstm", "mlstm")
LSTM_TYPE = ("lstm", "milstm", "mlstm")  # cells with gates and c
MULTIPLICATIVE = ("mrnn", "mlstm")  # cells with a factor m
UNITS = ("standard", "initial", "initial-text")  # of the LSTM-type cells
CONVENTIONS = ("", "protein", "openai-review", "nvidia-review")  # of records; the empty one is ours


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

    # orthogonal | orthogonal-blocks (each block of W_zm by itself) | gaussian: W_mh and W_zm
    recurrent: str = "orthogonal"
    recurrent_scale: float = 1.0
    input: str = "orthogonal"  # W_mx and W_zx
    input_scale: float = 1.0
    lower: str = "orthogonal"  # from the layer below, in every layer but the first
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
    floor: float = 0.0  # the rate does not decay below it
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
    # fp32 | bf16 (fp32 master weights and cell state) | fp8 (bf16 with recurrent products of 8-bit numbers)
    precision: str = "fp32"
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

    every: int = 0  # updates between validations; 0: at most ten a run
    symbols: int = 500_000  # of the validation split read each time; 0: all
    lanes: int = 100  # during training
    patience: int = 0  # validations without a gain before the run stops; 0: never. Keeps the best model
    final_lanes: int = 10  # for the numbers of the record
    calibrate: bool = False  # scale the trained model's logits and recurrent products as suits validation


@dataclass(frozen=True)
class DynamicRecipe:
    """How `mulstm reproduce` evaluates the trained model dynamically, after its run."""

    rate: float = 0.0  # 0: not at all (and elsewhere, as suits the size of the model)
    segment: int = 20  # symbols scored, then learnt from
    pull: float = 1e-3  # towards the trained weights, after each segment
    epsilon: float = 1e-5


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
    dynamic: DynamicRecipe = field(default_factory=DynamicRecipe)


SECTIONS: dict[str, type] = {
    name: kind
    for name, kind in get_type_hints(Recipe).items()
    if isinstance(kind, type) and is_dataclass(kind)
}
Table = dict[str, Any]


def _known_keys() -> dict[str, type]:
    """Every key, dotted, with its type: {"name": str, "model.cell": str, ...}."""
    keys = {name: kind for name, kind in get_type_hints(Recipe).items() if name not in SECTIONS}
    for section, kind in SECTIONS.items():
        keys |= {f"{section}.{name}": of for name, of in get_type_hints(kind).items()}
    return keys


KEYS = _known_keys()
