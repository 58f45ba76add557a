"""What the paper prints: its three tables, its two data figures, and the rows it quotes from others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A line of a table of the paper; `row` is the recipes' name for it, empty where it is quoted."""

    label: str
    paper: float  # what the table is in: bits/char, or word perplexity on the test part
    row: str = ""
    parameters: str = ""
    valid: float = 0.0  # word perplexity on the validation part
    bits: float = 0.0  # bits/char, where the table is in perplexities
    fast: str = ""  # what our fast recipe trains, where that is another model than the line's
    extra: str = ""  # what our fast recipe has instead or besides
    front: bool = False  # stands in the README's table

    @property
    def title(self) -> str:
        """The label, and what differs from it."""
        return f"{self.label}; fast: {self.fast or self.extra}" if self.fast or self.extra else self.label


@dataclass(frozen=True)
class Table:
    """A table of the paper, with what its later paper on dynamic evaluation adds."""

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    dynamic: float = 0.0  # published by the same authors for the last line's model; 0: nothing

    @property
    def is_in_words(self) -> bool:
        """Whether its scores are word perplexities, not bits/char."""
        return self.name == "wikitext2"

    @property
    def measure(self) -> str:
        """The key of a record that its scores stand under."""
        return "test_word_perplexity" if self.is_in_words else "test_bits_per_char"

    @property
    def digits(self) -> int:
        """After the point of a score."""
        return 1 if self.is_in_words else 3


HUTTER = Table(
    "hutter",
    "Hutter Prize (enwik8)",
    "test bits/char",
    (
        Line("stacked LSTM (7-layer), Graves 2013", 1.67, parameters="21M"),
        Line("stacked LSTM (7-layer) + dynamic eval, Graves 2013", 1.33, parameters="21M"),
        Line("MI-LSTM, Wu 2016", 1.44, parameters="17M"),
        Line("recurrent memory array structures, Rocki 2016", 1.40),
        Line("feedback LSTM + zoneout, Rocki 2016", 1.37),
        Line("hyperLSTM, Ha 2017", 1.34, parameters="27M"),
        Line("hierarchical multiscale LSTM, Chung 2017", 1.32),
        Line("bytenet decoder, Kalchbrenner 2016", 1.31),
        Line("LSTM (4 layer) + VD + BB tuning, Melis 2017", 1.30, parameters="46M"),
        Line("RHN (rec depth 7) + VD, Zilly 2017", 1.27, parameters="46M"),
        Line("Fast-slow LSTM (rec depth 4) + zoneout, Mujika 2017", 1.25, parameters="47M"),
        Line("2-layer stacked LSTM (RMS prop, 4 epoch)", 1.53, "lstm-stacked-rmsprop", extra="Adam"),
        Line("the same, optimiser as the mLSTM's, start chosen", 0.0, "lstm-stacked-matched"),
        Line("MI-LSTM", 1.53, "milstm", "22M"),
        Line("unregularised mLSTM (RMS prop, 4 epoch)", 1.42, "mlstm-rmsprop", "20M", extra="Adam"),
        Line("the same, unit as the paper's text has it", 1.42, "mlstm-rmsprop-text", "20M", extra="Adam"),
        Line("unregularised mLSTM", 1.40, "mlstm", "20M", front=True),
        Line("mLSTM +emb +WN", 1.44, "mlstm-emb-wn", "22M"),
        Line("mLSTM +emb +WN +VD", 1.28, "mlstm-emb-wn-vd", "22M", extra="weight decay", front=True),
        Line("large mLSTM +emb +WN +VD, weight decay, short run", 0.0, "mlstm-emb-wn-vd-large-ten"),
        Line(
            "large mLSTM +emb +WN +VD, weight decay, output dropout, long run",
            0.0,
            "mlstm-emb-wn-vd-large-long",
            front=True,
        ),
        Line(
            "large mLSTM +emb +WN +VD",
            1.24,
            "mlstm-emb-wn-vd-large",
            "46M",
            extra="weight decay",
            front=True,
        ),
    ),
    dynamic=1.08,
)
TEXT8 = Table(
    "text8",
    "text8",
    "test bits/char",
    (
        Line("mRNN, Mikolov 2012", 1.54),
        Line("MI-LSTM, Wu 2016", 1.44),
        Line("LSTM, Cooijmans 2017", 1.43),
        Line("batch normalised LSTM, Cooijmans 2017", 1.36),
        Line("layer-norm hierarchical multiscale LSTM, Chung 2017", 1.29),
        Line("RHN (rec depth 10) + VD, Zilly 2017", 1.27),
        Line("small LSTM, Zhang 2016", 1.65),
        Line("small deep LSTM (best), Zhang 2016", 1.63),
        Line("small LSTM (RMSprop)", 1.64, "lstm-small", extra="Adam"),
        Line("small mLSTM (RMSprop)", 1.59, "mlstm-small", extra="Adam"),
        Line("unregularised mLSTM (RMSprop)", 1.40, "mlstm-rmsprop", extra="Adam", front=True),
        Line(
            "large mLSTM +emb +WN +VD, weight decay, output dropout, calibrated, short run",
            0.0,
            "mlstm-emb-wn-vd-large-ten",
        ),
        Line(
            "large mLSTM +emb +WN +VD, weight decay, output dropout, calibrated, long run",
            0.0,
            "mlstm-emb-wn-vd-large-long",
            front=True,
        ),
        Line(
            "large mLSTM +emb +WN +VD",
            1.27,
            "mlstm-emb-wn-vd-large",
            "45M",
            extra="weight decay",
            front=True,
        ),
    ),
    dynamic=1.19,
)
WIKITEXT2 = Table(
    "wikitext2",
    "WikiText-2, by bytes",
    "word perplexity, valid / test",
    (
        Line("LSTM, Grave 2017", 99.3, valid=104.2),
        Line("LSTM + VD (untied), Inan 2017", 93.1, valid=98.8),
        Line("LSTM + VD (tied), Inan 2017", 87.0, valid=91.5),
        Line("Pointer Sentinel LSTM, Merity 2016", 80.8, valid=84.8),
        Line("LSTM (tied) + VD + BB tuning, Melis 2017", 65.9, valid=69.1),
        Line("LSTM + neural cache, Grave 2017", 68.9, valid=72.1),
        Line("LSTM + dynamic eval, Krause 2017", 59.8, valid=63.7),
        Line("AWD-LSTM (tied), Merity 2017", 65.8, valid=68.6),
        Line("AWD-LSTM (tied) + neural cache, Merity 2017", 52.0, valid=53.8),
        Line("AWD-LSTM (tied) + dynamic eval, Krause 2017", 44.3, valid=46.4),
        Line(
            "byte mLSTM +emb +WN +VD",
            88.8,
            "mlstm-emb-wn-vd-large",
            "46M",
            valid=92.8,
            bits=1.2649,
            extra="weight decay, output dropout",
            front=True,
        ),
    ),
)
PTB = Table(
    "ptb",
    "Penn Treebank, by characters",
    "test bits/char",
    (
        Line(
            "unregularised mLSTM (older versions of the paper)",
            1.35,
            "mlstm",
            fast="mLSTM +emb +WN +VD, weight decay, output dropout",
            front=True,
        ),
    ),
)
TABLES = (HUTTER, TEXT8, WIKITEXT2, PTB)

# Hutter Prize section: mean loss in bits on the 10 % most surprising symbols, and 1-4 steps after.
SURPRISE_MLSTM = (6.27, 2.26, 2.04, 1.61, 1.51)
SURPRISE_LSTM = (6.29, 2.48, 2.25, 1.79, 1.67)

# README of the authors' code: the large model takes about a week on a GTX 1080 Ti.
AUTHORS_MINUTES = 7 * 24 * 60.0
