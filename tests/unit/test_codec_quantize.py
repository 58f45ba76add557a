"""Making an integer model: what can be made one, what is refused, and its file."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from codec_models import integer, parent
from mulstm import tensorfile
from mulstm.checkpoint import Checkpoint
from mulstm.codec import integer as files
from mulstm.codec.fold import fold, lengths, outer_sum
from mulstm.codec.quantize import quantize
from mulstm.codec.source import quantize_checkpoint
from mulstm.data.alphabet import Alphabet
from mulstm.errors import BackendError, CheckpointError
from mulstm.recipe import Recipe


def test_the_bias_inside_the_last_tanh_is_no_part_of_z() -> None:
    model = parent(hidden=6, embedding=0, weight_norm=False, unit="initial")
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    (layer,) = fold(weights, model.recipe)
    acting = model.stack[0].weights(torch.float64)
    np.testing.assert_allclose(layer.zx, (acting.W_zx.T + acting.b_z).detach().numpy(), atol=1e-7)
    np.testing.assert_allclose(layer.b_h, acting.b_h.detach().numpy(), atol=1e-7)


def test_quantizing_does_not_depend_on_how_sums_are_made() -> None:
    model = parent(hidden=12)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    one = quantize(weights, model.recipe, Alphabet.bytes(), "a")
    again = {name: np.asfortranarray(array.astype(np.float64)) for name, array in weights.items()}
    assert quantize(again, model.recipe, Alphabet.bytes(), "b").fingerprint == one.fingerprint


def test_sums_go_from_left_to_right() -> None:
    rng = np.random.default_rng(0)
    x, W = rng.normal(size=(3, 50)), rng.normal(size=(40_000, 50))
    expected = np.zeros((3, 40_000))
    for e in range(50):
        expected += x[:, e : e + 1] * W[:, e]
    assert np.array_equal(outer_sum(x, W), expected)
    assert lengths(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist() == [5.0, 1.0]


def test_units_that_never_speak_have_integer_counterparts() -> None:
    """One whose factor is zero, and those whose factor is large for a symbol only that never comes."""
    alphabet = Alphabet(b"abcdef")
    model = parent(alphabet, hidden=200, embedding=0, weight_norm=False)
    weights = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    weights["layers.0.W_mh"][:] = np.where(weights["layers.0.W_mh"] > 0, 0.05, -0.05)
    weights["layers.0.W_mx"][:, 0] = 1e6
    weights["layers.0.W_mx"][7] = 0
    weights["b_out"][0] = -1e4
    (layer,) = quantize(weights, model.recipe, alphabet, "0" * 64).layers
    assert layer.mx is not None
    assert not layer.mx[:, 7].any()


@pytest.mark.parametrize(
    ("wiring", "word"), [({"cell": "tensor-rnn"}, "tensor-rnn"), ({"cell": "milstm", "layers": 2}, "milstm")]
)
def test_cells_without_integer_arithmetic_are_refused(wiring: dict[str, object], word: str) -> None:
    with pytest.raises(BackendError, match=word):
        integer(Alphabet(b"ab"), hidden=3, **wiring)


def test_more_units_than_the_output_layer_serves_are_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mulstm.codec.quantize.WIDEST", 11)
    monkeypatch.setattr("mulstm.codec.quantize.fold", None)
    with pytest.raises(BackendError, match="The output layer sees 12 units, and whole numbers serve 11"):
        integer(hidden=4, layers=3, skip=True)


def test_weights_in_bf16_are_taken() -> None:
    narrow = parent(hidden=4).bfloat16()
    wide = copy.deepcopy(narrow).float()
    made = [quantize_checkpoint(Checkpoint(one, Alphabet.bytes(), Recipe(), {})) for one in (narrow, wide)]
    assert made[0].fingerprint == made[1].fingerprint


def test_weights_that_are_not_finite_are_refused() -> None:
    model = parent(hidden=4)
    weights = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    weights["W_out"][0, 0] = np.nan
    with pytest.raises(BackendError, match="W_out"):
        quantize(weights, model.recipe, Alphabet.bytes(), "")


def test_numbers_that_the_arithmetic_does_not_count_on_are_refused() -> None:
    model = integer(hidden=200, embedding=0)
    (layer,) = model.layers
    far = {"W_zm": np.full_like(layer.W_zm, 127), "R_zm": np.full_like(layer.R_zm, 2**31 - 1)}
    files.check(model)
    for changed, words in (
        (replace(model, W_out=np.full_like(model.W_out, -128)), "W_out holds -128"),
        (replace(model, rate=np.array([9, 3, 0], dtype=np.int32)), r"rate is \[9, 3, 0\]"),
        (replace(model, layers=(replace(layer, **far),)), r"sums of layers\.0\.W_zm go too far"),
        (replace(model, layers=(replace(layer, e_m=np.full_like(layer.e_m, 17)),)), "e_m is above 16"),
    ):
        with pytest.raises(ValueError, match=words):
            files.check(changed)


def test_all_that_adds_up_to_z_is_reckoned_with() -> None:
    """Each sum alone stays below its bound, and two of them do not."""
    model = integer(hidden=200, embedding=0, layers=2)
    first, second = model.layers
    most = (files.EXACT - (1 << files.SHIFT)) // (files.PLANES * 127 * 200)  # what R may be
    layer = replace(second, zx=0 * second.zx, R_zm=0 * second.R_zm, R_zl=0 * second.R_zl)
    zm = {"W_zm": np.full_like(layer.W_zm, 127), "R_zm": np.full_like(layer.R_zm, most)}
    zl = {"W_zl": np.full_like(layer.W_zl, 127), "R_zl": np.full_like(layer.R_zl, most)}
    zx = {"zx": np.full_like(layer.zx, 32767)}

    def check(**changes: object) -> None:
        files.check(replace(model, layers=(first, replace(layer, **changes))))

    for alone in (zm, zl, zx):
        check(**alone)
    for together in (zm | zl, zm | zx, zl | zx):
        with pytest.raises(ValueError, match=r"sums of layers\.1\.W_zm go too far"):
            check(**together)


def test_a_model_file_comes_back(tmp_path: Path) -> None:
    model = integer(layers=2)
    files.save(tmp_path / "m", model)
    found = files.load(tmp_path / "m")
    assert (found.fingerprint, found.parent) == (model.fingerprint, model.parent)
    assert files.is_one(tmp_path / "m")
    one = (tmp_path / "m").read_bytes()
    files.save(tmp_path / "m", model)
    assert (tmp_path / "m").read_bytes() == one


def test_a_model_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m"
    files.save(path, integer())
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="fingerprint"):
        files.load(path)
    path.write_bytes(whole.replace(b'\\"arithmetic\\": 1', b'\\"arithmetic\\": 2'))
    with pytest.raises(CheckpointError, match="arithmetic 2"):
        files.load(path)
    path.write_bytes(whole.replace(b'\\"hidden\\": 12', b'\\"hidden\\": 13'))
    with pytest.raises(CheckpointError, match="cannot be read"):
        files.load(path)
    path.write_bytes(b"no model")
    assert not files.is_one(path)


def test_a_model_file_of_other_things_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m"
    files.save(path, integer())
    tensors, meta = tensorfile.read(path, files.KIND)
    for write in (
        lambda: tensorfile.write(path, {**tensors, "b_more": tensors["b_out"]}, meta),
        lambda: files.save(path, replace(integer(), layers=())),
    ):
        write()
        assert files.is_one(path)
        with pytest.raises(CheckpointError, match="cannot be read"):
            files.load(path)
    text = json.dumps({"__metadata__": {"mulstm": "[" * 100_000}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert not files.is_one(path)
