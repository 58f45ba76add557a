"""Every recipe in the package, found by walking: it loads, builds, and has the paper's parameters."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mulstm import recipe
from mulstm.data import Alphabet, Lanes, Split
from mulstm.data.text import Text
from mulstm.nn.model import LanguageModel

FOLDER = Path(recipe.__file__).parents[1] / "recipes"
FILES = sorted(FOLDER.rglob("*.toml"))
NAMES = [file.relative_to(FOLDER).with_suffix("").as_posix() for file in FILES]
SYMBOLS = {"enwik8": 205, "text8": 27, "wikitext2": 178, "ptb": 50}

# Exact counts, from the formulas of the paper's equations, and what the paper prints.
PARAMETERS = {
    "hutter/mlstm-rmsprop": 20_394_600,
    "hutter/mlstm-rmsprop-text": 20_394_600,
    "hutter/lstm-stacked-rmsprop": 21_322_500,
    "hutter/lstm-stacked-matched": 21_322_500,
    "hutter/mlstm": 20_394_600,
    "hutter/mlstm-emb-wn": 22_348_305,
    "hutter/mlstm-emb-wn-vd": 22_348_305,
    "hutter/mlstm-emb-wn-vd-large": 45_495_405,
    "hutter/milstm": 22_005_823,
    "text8/lstm-small": 1_119_744,
    "text8/mlstm-small": 1_087_200,
    "text8/mlstm-rmsprop": 18_365_400,
    "text8/mlstm-emb-wn-vd-large": 44_925_627,
    "wikitext2/mlstm-emb-wn-vd-large": 45_408_978,
}


def built(name: str) -> int:
    one = recipe.load(name)
    with torch.device("meta"):
        return LanguageModel(one.model, SYMBOLS.get(one.data.corpus, 256)).parameter_count()


def test_none_has_gone() -> None:
    assert len(FILES) >= 50
    assert sorted(NAMES) == recipe.names()


@pytest.mark.parametrize("name", NAMES)
def test_loads_builds_and_writes_back(name: str, tmp_path: Path) -> None:
    one = recipe.load(name)
    assert one.name == name
    assert one.title
    assert built(name) > 0
    copy = tmp_path / "copy.toml"
    copy.write_text(recipe.dumps(one))
    assert recipe.load(copy) == one


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_every_value_says_where_it_comes_from(file: Path) -> None:
    section = ""
    for line in file.read_text().splitlines():
        if line.startswith("["):
            section = line
        elif "=" in line and (section or line.startswith("paper")):
            assert re.search(r"  # (paper|the paper|authors' code|ours)\b", line), line


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_named_after_their_table(name: str) -> None:
    one = recipe.load(name)
    if one.table:
        assert name == f"{one.table}/{one.row}" + ("-fast" if one.kind == "fast" else "")
        assert one.kind in ("faithful", "fast")
        ours = one.row.startswith("size/") or one.row.endswith(("-matched", "-ten", "-long"))
        assert (one.paper > 0) != ours
        assert one.data.alphabet == "corpus"


# The fast stacked LSTM is the matched one with another optimiser, so "-matched" has none of its own.
@pytest.mark.parametrize("name", [n for n in NAMES if "/" in n and not n.endswith(("-fast", "-matched"))])
def test_every_row_has_a_fast_recipe_of_the_same_model(name: str) -> None:
    slow, fast = recipe.load(name), recipe.load(f"{name}-fast")
    assert fast.paper == slow.paper
    assert fast.data == slow.data
    if name != "ptb/mlstm":  # whose size the paper does not give
        assert built(name) == built(f"{name}-fast")


@pytest.mark.parametrize("name", PARAMETERS)
def test_exact_parameter_counts(name: str) -> None:
    assert built(name) == PARAMETERS[name]


@pytest.mark.parametrize("size", ["3m", "5m", "10m"])
def test_the_size_figure_compares_equals(size: str) -> None:
    target = int(size[:-1]) * 1e6
    mlstm, lstm = built(f"hutter/size/mlstm-{size}"), built(f"hutter/size/lstm-{size}")
    assert abs(mlstm / target - 1) < 0.03
    assert abs(lstm / mlstm - 1) < 0.003
    assert built(f"hutter/size/lstm-{size}-matched") == lstm


def test_the_authors_length_of_training() -> None:
    """180,000 and 38,000 updates, less one an epoch: their last target is the first byte that is held out."""
    text = Text([np.zeros(2, dtype=np.uint8)])
    for name, stop, updates, epochs in (
        ("hutter/mlstm-emb-wn-vd-large", 90_000_000, 180_000, 40),
        ("hutter/mlstm-rmsprop", 95_000_000, 38_000, 4),
    ):
        train = recipe.load(name).train
        split = Split("enwik8", "train", Alphabet.bytes(), text, 1, stop)
        chunks = len(Lanes(split, train.lanes, train.chunk, trim=True, block=train.block))
        assert train.epochs == epochs
        assert epochs * (chunks + 1) == updates


def test_the_product_of_both_recurrent_matrices_starts_as_the_footnote_says() -> None:
    """A spectral radius of 0.7 x 0.7 for the multiplicative LSTM, 0.5 for the MI-LSTM's one matrix."""
    for name, radius in (("hutter/mlstm", 0.49), ("hutter/milstm", 0.5)):
        one = recipe.load(name)
        layer = LanguageModel(replace(one.model, hidden=64), 8, init=one.init).stack[0]
        W = layer.get_parameter("W_zm").detach()[:64]
        W = W @ layer.get_parameter("W_mh").detach() if one.model.cell == "mlstm" else W
        assert float(torch.linalg.eigvals(W).abs().max()) == pytest.approx(radius, rel=1e-5)
