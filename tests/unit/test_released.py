"""The models that come with the source: what their card says of them is true of the files."""

from pathlib import Path

import pytest
import torch

from mulstm import checkpoint
from mulstm.codec.source import quantize_checkpoint
from mulstm.units import bits_per_char

FOLDER = Path(__file__).parents[2] / "models"
TEXT = b"The '''sea otter''' is a [[mammal]] that lives near the coasts of the northern [[Pacific Ocean]]."


@pytest.fixture(scope="module")
def model():
    return checkpoint.load("enwik8-22m")


def test_is_found_by_name_and_is_what_the_card_says(model) -> None:
    file = checkpoint.find("enwik8-22m")
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert file.stat().st_size < 25_000_000
    assert f"`{model.meta['fingerprint']}`" in card
    assert f"{model.model.parameter_count():,} parameters" in card
    metrics = model.meta["metrics"]
    assert f"**{metrics['test_bits_per_char']:.4f}**" in card
    assert f"{metrics['before_rounding']['test_bits_per_char']:.4f} as trained" in card


def test_has_learnt_to_read(model) -> None:
    symbols = torch.from_numpy(model.alphabet.encode(TEXT)).long()[None]
    with torch.no_grad():
        logits, _ = model.model(symbols[:, :-1], None)
    nats = torch.nn.functional.cross_entropy(logits[0], symbols[0, 1:], reduction="sum")
    assert (
        bits_per_char(float(nats), symbols.shape[1] - 1) < 2.3
    )  # from a cold start; 7.7 for one that knows nothing


@pytest.mark.slow
def test_archives_made_with_it_stay_readable(model) -> None:
    """Another fingerprint, and no archive that anybody made with this model could be read again."""
    made = quantize_checkpoint(model)
    assert made.fingerprint.hex().startswith("179a12fd18e5888c")
