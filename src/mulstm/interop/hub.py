"""Folders with the conventions of the Hugging Face hub: model.safetensors, config.json and a model card."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

from mulstm import checkpoint
from mulstm import recipe as recipes
from mulstm.checkpoint import Checkpoint
from mulstm.errors import CheckpointError, ExtraError, MulstmError
from mulstm.files import filling, write_atomic
from mulstm.tensorfile import as_object

MODEL, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
_FINGERPRINT = re.compile("Fingerprint: `([0-9a-f]{64})`")
_LICENCE = re.compile("^license: .*\n", re.MULTILINE)
_LICENCES = {"CC BY-NC 4.0": "cc-by-nc-4.0", "MIT": "mit"}


def save_pretrained(loaded: Checkpoint, folder: str | os.PathLike[str], *, licence: str = "") -> list[Path]:
    """Writes the folder; a model card of the user's own that is already there is kept."""
    place, meta = Path(folder), loaded.meta
    is_written = not (place / CARD).exists() or _is_as_made(place)
    with filling(place) as made:
        # A model that was changed since it was loaded is another one, and nothing of it is rounded.
        fingerprint = checkpoint.save(
            made / MODEL,
            loaded.model,
            loaded.alphabet,
            recipe=loaded.recipe,
            metrics=meta.get("metrics"),
            source=meta.get("source"),
            corpus=meta.get("corpus"),
            storage=checkpoint.storage_of(loaded),
        )
        loaded = dataclasses.replace(loaded, meta={**meta, "fingerprint": fingerprint})
        write_atomic(made / CONFIG, json.dumps(_config(loaded), indent=2, sort_keys=True) + "\n")
        if is_written:
            text = card(loaded, place.resolve().name, licence)
            write_atomic(made / CARD, text.encode(errors="replace"))  # a file's name may be no text
        else:
            _require_of(place / CARD, fingerprint)
    return [place / MODEL, place / CONFIG, *[place / CARD] * is_written]


def _is_as_made(place: Path) -> bool:
    """Whether the card in a folder is as it was made for the model beside it, with whatever licence."""
    try:
        found = (place / CARD).read_text(encoding="utf-8")
        made = card(checkpoint.load(place / MODEL), place.resolve().name)
    except (OSError, ValueError, MulstmError):
        return False
    return _LICENCE.sub("", found) == _LICENCE.sub("", made)


def _require_of(path: Path, fingerprint: str) -> None:
    """A card with somebody's own words in it is kept, but not beside another model than it says it is of."""
    stated = _FINGERPRINT.search(path.read_text(encoding="utf-8", errors="replace"))
    if stated is not None and stated[1] != fingerprint:
        raise CheckpointError(
            f"{path} is the card of another model ({stated[1][:12]}...), and was changed by hand. "
            "Take its last line out if it is right for this one too, or move it away."
        )


def from_pretrained(
    name: str | os.PathLike[str], *, revision: str | None = None, device: str = "cpu"
) -> Checkpoint:
    """A model from a local folder, or from the hub by its "owner/name"; every weight is there or it fails."""
    place = Path(name)
    if not place.is_dir():
        owner, _, model = str(name).partition("/")
        if owner in ("", ".", "..", "~") or not model or "/" in model:
            raise CheckpointError(
                f'There is no folder {name}. Give one that save_pretrained wrote, or "owner/name" of the hub.'
            )
        place = _downloaded(str(name), revision)
    if not (place / MODEL).is_file():
        raise CheckpointError(f"There is no {MODEL} in {place}. Give a folder that save_pretrained wrote.")
    loaded = checkpoint.load(place / MODEL, device)
    try:
        stated = as_object(json.loads((place / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{place / CONFIG} cannot be read ({error}). Save the model again.") from error
    stated["recipe"] = _completed(stated.get("recipe"))
    expected = json.loads(json.dumps(_config(loaded)))
    if wrong := sorted(k for k in stated.keys() | expected.keys() if stated.get(k) != expected.get(k)):
        raise CheckpointError(
            f"{CONFIG} in {place} does not belong to the model beside it ({', '.join(wrong)} differ). "
            "Save the model again."
        )
    return loaded


def push(folder: str | os.PathLike[str], name: str, *, private: bool = True) -> str:
    """Uploads a saved folder to the hub and returns its address; the hub's own login is used."""
    hub = _hub()
    api = hub.HfApi()
    address = api.create_repo(name, private=private, exist_ok=True)
    api.upload_folder(repo_id=name, folder_path=str(folder), allow_patterns=[MODEL, CONFIG, CARD])
    return str(address)


def card(loaded: Checkpoint, name: str, licence: str = "") -> str:
    """A model card: what the model is, what it measures, where it comes from, how to use it."""
    source, metrics = loaded.source, loaded.meta.get("metrics") or {}
    stated = str(source.get("licence", ""))
    licence = licence or next((tag for words, tag in _LICENCES.items() if stated.startswith(words)), "")
    recipe = loaded.model.recipe
    is_mlstm = recipe.cell == "mlstm"
    front = ["library_name: mulstm", "tags:", *["- multiplicative-lstm"] * is_mlstm, "- mulstm"]
    front += [f"license: {licence}"] if licence else []
    kind = "A multiplicative LSTM language model" if is_mlstm else f"A language model of {recipe.cell} cells"
    lines = ["---", *front, "---", "", f"# {name}", ""]
    lines += [
        f"{kind}: {recipe.layers} layer(s) of {recipe.hidden} units, "
        f"{loaded.model.parameter_count():,} parameters, {loaded.alphabet.size} symbols.",
        "",
        "```python",
        "import mulstm",
        "",
        f'model = mulstm.from_pretrained("{name}")',
        "```",
        "",
    ]
    measured = {k: v for k, v in metrics.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    if measured:
        lines += ["| measure | value |", "|---|---|"]
        lines += [f"| {key} | {value:.6g} |" for key, value in sorted(measured.items())] + [""]
    if source:
        lines += ["Imported:" if "format" in source else "Source:", ""]
        lines += [f"- {key}: {value}" for key, value in sorted(source.items())] + [""]
    lines += [f"Fingerprint: `{loaded.meta.get('fingerprint', '')}`", ""]
    return "\n".join(lines)


def _completed(recipe: Any) -> Any:
    """With the keys that recipes have had since it was written."""
    try:
        whole = recipes.as_dict(recipes.from_dict(recipe))
    except (MulstmError, AttributeError, TypeError):
        return recipe
    return whole if recipe.keys() - {"model"} else {"model": whole["model"]}


def _config(loaded: Checkpoint) -> dict[str, Any]:
    recipe = recipes.as_dict(loaded.recipe)
    return {
        "model_type": "mulstm",
        "recipe": recipe if loaded.tells_its_training else {"model": recipe["model"]},
        "alphabet": loaded.alphabet.to_json(),
        "source": dict(loaded.source),
        "fingerprint": loaded.meta["fingerprint"],
    }


def _downloaded(name: str, revision: str | None) -> Path:
    hub = _hub()
    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=[MODEL, CONFIG, CARD]))
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f'"{name}" is neither a folder nor a model that the hub gave us ({first}). '
            "Check the name and the connection, or give a local folder."
        ) from error


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        what = "The hub needs huggingface_hub, which is not installed"
        raise ExtraError(what, "hub", ", or give a local folder") from error
    return huggingface_hub
