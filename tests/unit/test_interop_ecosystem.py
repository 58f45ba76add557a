"""Models leave for the hub and for ONNX whole, and come back the same or not at all."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mulstm import checkpoint
from mulstm.checkpoint import Checkpoint
from mulstm.codec import quantize_checkpoint
from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckFailedError, CheckpointError
from mulstm.interop import hub
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe, Recipe


def saved(tmp_path: Path, **recipe: object) -> Checkpoint:
    torch.manual_seed(0)
    model = LanguageModel(ModelRecipe(**({"hidden": 6} | recipe)), 256)  # type: ignore[arg-type]
    path = tmp_path / "m.safetensors"
    metrics = {"valid_bits_per_char": 1.5, "note": "x"}
    source = {"format": "unirep", "licence": "CC BY-NC 4.0 (weights)"}
    checkpoint.save(
        path, model, Alphabet.bytes(), recipe=Recipe(model=model.recipe), metrics=metrics, source=source
    )
    return checkpoint.load(path)


def test_a_folder_for_the_hub_and_back(tmp_path: Path) -> None:
    loaded = saved(tmp_path)
    files = hub.save_pretrained(loaded, tmp_path / "my-model")
    assert checkpoint.find(tmp_path / "my-model") == files[0]
    assert [f.name for f in files] == ["model.safetensors", "config.json", "README.md"]
    back = hub.from_pretrained(tmp_path / "my-model")
    assert back.meta["fingerprint"] == loaded.meta["fingerprint"]
    assert back.meta["source"] == loaded.meta["source"]
    assert not back.model.training
    card = (tmp_path / "my-model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: mulstm\n")
    assert "license: cc-by-nc-4.0" in card
    assert "| valid_bits_per_char | 1.5 |" in card
    assert "# my-model" in card


@pytest.mark.parametrize("whole", [True, False])
def test_a_folder_from_before_a_key_was_added(whole: bool, tmp_path: Path) -> None:
    loaded = saved(tmp_path)
    if whole:
        loaded = replace(loaded, recipe=replace(loaded.recipe, name="mine"))
    hub.save_pretrained(loaded, tmp_path / "old")
    config = tmp_path / "old" / "config.json"
    stated = json.loads(config.read_text())
    del stated["recipe"]["model"]["learn_b_h"]
    if whole:
        del stated["recipe"]["data"]["protocol"], stated["recipe"]["evaluate"]
    config.write_text(json.dumps(stated))
    assert hub.from_pretrained(tmp_path / "old").meta["fingerprint"] == loaded.meta["fingerprint"]
    for wrong in ({"model": {"hidden": 1}}, {"model": 3}, {"nonsense": 1}, 7, None):
        config.write_text(json.dumps(stated | {"recipe": wrong}))
        with pytest.raises(CheckpointError, match=r"does not belong .* \(recipe differ\)"):
            hub.from_pretrained(tmp_path / "old")


def test_a_card_states_no_licence_that_is_only_mentioned(tmp_path: Path) -> None:
    loaded = saved(tmp_path)
    loaded.meta["source"]["licence"] = "as the file it was made from (OpenAI's release: MIT)"
    assert "license:" not in hub.card(loaded, "mine")


def test_a_card_says_what_the_model_is(tmp_path: Path) -> None:
    loaded = saved(tmp_path)
    told = hub.card(loaded, "mine")
    assert "A multiplicative LSTM language model: 1 layer(s)" in told
    assert "Imported:\n\n- format: unirep" in told
    loaded = saved(tmp_path, cell="lstm")
    loaded.meta["source"] = {"convention": "protein"}
    told = hub.card(loaded, "mine")
    assert "A language model of lstm cells: 1 layer(s)" in told
    assert "multiplicative" not in told
    assert "Source:\n\n- convention: protein" in told


def test_a_rounded_or_changed_model_comes_back(tmp_path: Path) -> None:
    loaded = saved(tmp_path)
    checkpoint.save(tmp_path / "small.safetensors", loaded.model, loaded.alphabet, storage="int8")
    small = checkpoint.load(tmp_path / "small.safetensors")
    hub.save_pretrained(small, tmp_path / "a")
    assert hub.from_pretrained(tmp_path / "a").meta["storage"] == "int8"
    with torch.no_grad():
        small.model.W_out *= 1.01
    hub.save_pretrained(small, tmp_path / "b")
    back = hub.from_pretrained(tmp_path / "b")
    assert torch.equal(back.model.W_out, small.model.W_out)
    assert back.meta["fingerprint"] in (tmp_path / "b" / "README.md").read_text()
    hub.save_pretrained(Checkpoint(small.model, small.alphabet, small.recipe, {}), tmp_path / "c")
    assert torch.equal(hub.from_pretrained(tmp_path / "c").model.W_out, small.model.W_out)
    assert quantize_checkpoint(small).parent == checkpoint.fingerprint(small.model, small.alphabet)


def test_a_card_that_is_there_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    hub.save_pretrained(saved(tmp_path), folder)
    assert (folder / "README.md").read_text() == "mine"


def test_the_card_of_the_model_before_is_not_kept(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    hub.save_pretrained(saved(tmp_path, hidden=5), folder, licence="mit")
    files = hub.save_pretrained(saved(tmp_path, hidden=6), folder)
    assert [f.name for f in files] == ["model.safetensors", "config.json", "README.md"]
    assert "of 6 units" in (folder / "README.md").read_text()
    # What somebody has written is not thrown away, nor left beside another model.
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text("Mine. " + card)
    assert len(hub.save_pretrained(saved(tmp_path, hidden=6), folder)) == 2
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"is the card of another model .* by hand\. Take its"):
        hub.save_pretrained(saved(tmp_path, hidden=7), folder)
    assert (folder / "README.md").read_text() == "Mine. " + card
    assert (folder / "model.safetensors").read_bytes() == before


def test_folders_that_do_not_hold_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "f"
    hub.save_pretrained(saved(tmp_path), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"surprise": 1}))
    with pytest.raises(CheckpointError, match="surprise differ"):
        hub.from_pretrained(folder)
    for damaged in ("[1, 2]", "[[1, 2]]", "3", "[" * 20_000, "{"):
        (folder / "config.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
            hub.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        hub.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        hub.from_pretrained(folder)
    assert capsys.readouterr().out == ""


def test_a_name_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **how: object) -> str:
        raise FileNotFoundError("cannot be reached")

    monkeypatch.setattr(hub, "_hub", lambda: SimpleNamespace(snapshot_download=refuse))
    with pytest.raises(CheckpointError, match='"nobody/nothing" is neither a folder nor a model'):
        hub.from_pretrained("nobody/nothing")
    for name in ("my-model", "./my-model", "/tmp/no/model", "a/b/c", "owner/"):
        with pytest.raises(
            CheckpointError, match=rf"There is no folder {name}\. Give one that save_pretrained"
        ):
            hub.from_pretrained(name)


def test_what_goes_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    class Api:
        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
            calls.append((name, private, exist_ok))
            return f"https://hub.example/{name}"

        def upload_folder(self, *, repo_id: str, folder_path: str, allow_patterns: list[str]) -> None:
            calls.append((repo_id, folder_path, sorted(allow_patterns)))

    monkeypatch.setattr(hub, "_hub", lambda: SimpleNamespace(HfApi=Api))
    assert hub.push(tmp_path, "me/mine") == "https://hub.example/me/mine"
    # Private unless asked otherwise, and nothing but the three files of a saved folder.
    assert calls == [
        ("me/mine", True, True),
        ("me/mine", str(tmp_path), ["README.md", "config.json", "model.safetensors"]),
    ]


@pytest.mark.parametrize(
    "recipe",
    [{"embedding": 3, "weight_norm": True}, {"layers": 2, "cell": "lstm", "skip": True}, {"cell": "mrnn"}],
    ids=["mlstm", "stacked-lstm", "mrnn"],
)
def test_the_onnx_step(recipe: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from mulstm.interop import onnx

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded = saved(tmp_path, **recipe)
    written = onnx.write(loaded, tmp_path / "step.onnx")
    assert written[0].exists()
    assert onnx.difference(onnx.Step(loaded.model), tmp_path / "step.onnx") < 1e-6
    assert checkpoint.fingerprint(loaded.model, loaded.alphabet) == loaded.meta["fingerprint"]
    x = torch.randint(256, (3, 5))
    with torch.no_grad():
        expected, _ = loaded.model(x)
    runtime = onnx.session(tmp_path / "step.onnx")
    names = [entry.name for entry in runtime.get_inputs()]
    states = [torch.stack([s[k] for s in loaded.model.zero_state(3)]).numpy() for k in (0, 1)]
    for t in range(5):
        given = dict(zip(onnx.INPUTS, [x[:, t].numpy(), *states], strict=True))
        logits, *states = runtime.run(None, {name: given[name] for name in names})
        np.testing.assert_allclose(logits, expected[:, t], atol=1e-5)
    with torch.no_grad():
        loaded.model.W_out.add_(0.5 * torch.randn_like(loaded.model.W_out))
    assert onnx.difference(onnx.Step(loaded.model), tmp_path / "step.onnx") > 1e-3
    assert not (tmp_path / "cache").exists()
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"


@pytest.mark.parametrize("error", [0.1, math.nan])
def test_an_onnx_file_that_fails_its_check_takes_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from mulstm.interop import onnx

    (tmp_path / "step.onnx").write_text("an older one")
    before = sorted(tmp_path.iterdir())
    loaded = saved(tmp_path)
    monkeypatch.setattr(onnx, "difference", lambda step, path: error)
    with pytest.raises(CheckFailedError, match=rf"differs from ours by {error:.1e}"):
        onnx.write(loaded, tmp_path / "step.onnx")
    assert (tmp_path / "step.onnx").read_text() == "an older one"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith((".", "step.onnx.")) and p not in before]


def test_the_layer_compiles_without_graph_breaks() -> None:
    from mulstm.nn import MultiplicativeLSTM

    torch.manual_seed(0)
    layer = MultiplicativeLSTM(3, 5, num_layers=2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 2, 3, requires_grad=True)
    y, _ = compiled(x)
    y.square().sum().backward()
    ours = x.grad
    x.grad = None
    layer(x)[0].square().sum().backward()
    torch.testing.assert_close(ours, x.grad)


def test_the_onnx_step_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from mulstm.interop import onnx

    loaded = saved(tmp_path)
    loaded.model.double().precision = "bf16"
    onnx.write(loaded, tmp_path / "step.onnx")
    assert (loaded.model.W_out.dtype, loaded.model.precision) == (torch.float64, "bf16")
    with pytest.raises(CheckpointError, match=r"\.onnx is no UTF-8, and ONNX can hold no other path"):
        onnx.write(loaded, tmp_path / os.fsdecode(b"caf\xe9.onnx"))
    loaded.meta["source"]["head"] = False
    with pytest.raises(CheckpointError, match="without its output layer"):
        onnx.write(loaded, tmp_path / "none.onnx")


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"caf\xe9")
    hub.save_pretrained(saved(tmp_path), place)
    assert "# caf?" in (place / "README.md").read_text()
    assert hub.from_pretrained(place).alphabet.size == 256
