"""Archives decoded by somebody else: a decoder written from docs/codec.md."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import codec_oracle
from codec_models import integer, mixed
from mulstm.codec import archive
from mulstm.codec import integer as files
from mulstm.codec.network import Network
from mulstm.codec.tables import tables
from mulstm.data.alphabet import Alphabet

WIRINGS: list[dict[str, Any]] = [
    {},
    {"unit": "initial"},
    {"unit": "initial-text", "embedding": 0, "weight_norm": False},
    {"layers": 2},
    {"layers": 2, "skip": True, "output_bias": False},
    {"cell": "lstm", "layers": 2, "skip": True},
    {"cell": "milstm"},
    {"cell": "rnn"},
    {"cell": "mrnn", "layers": 2},
]


@pytest.mark.parametrize("wiring", WIRINGS, ids=lambda w: "-".join(map(str, w.values())) or "plain")
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_oracle_decodes_archives(tmp_path: Path, wiring: dict[str, Any], adaptive: bool) -> None:
    model = integer(Alphabet(bytes(range(32, 120))), **wiring)
    files.save(tmp_path / "model", model)
    content, target = mixed(130, seed=1), io.BytesIO()
    how = {"lanes": 3, "block": 100, "adaptive": adaptive, "verify": False}
    done = archive.compress(io.BytesIO(content), target, Network(model), **how)
    assert (done.blocks, done.stored) == (2, 0)
    theirs = codec_oracle.read_model((tmp_path / "model").read_bytes())
    assert codec_oracle.decompress(theirs, target.getvalue()) == content


@pytest.mark.parametrize("hidden", [1, 6])
def test_the_oracle_decodes_a_single_lane(tmp_path: Path, hidden: int) -> None:
    model = integer(hidden=hidden)
    files.save(tmp_path / "model", model)
    content, target = mixed(90), io.BytesIO()
    assert not archive.compress(io.BytesIO(content), target, Network(model), lanes=1, verify=False).stored
    theirs = codec_oracle.read_model((tmp_path / "model").read_bytes())
    assert codec_oracle.decompress(theirs, target.getvalue()) == content


def test_the_oracle_decodes_long_matches_and_many_lanes(tmp_path: Path) -> None:
    model = integer(hidden=4)
    files.save(tmp_path / "model", model)
    content, target = b"abcdefgh" * 60 + mixed(431), io.BytesIO()
    archive.compress(io.BytesIO(content), target, Network(model), lanes=130, verify=False)
    theirs = codec_oracle.read_model((tmp_path / "model").read_bytes())
    assert codec_oracle.decompress(theirs, target.getvalue()) == content


def test_the_oracle_decodes_matches_that_lead_past_a_short_last_lane(tmp_path: Path) -> None:
    model = integer()
    files.save(tmp_path / "model", model)
    content, target = (b"abcdefghij" * 40)[:397], io.BytesIO()
    archive.compress(io.BytesIO(content), target, Network(model), lanes=7)
    theirs = codec_oracle.read_model((tmp_path / "model").read_bytes())
    assert codec_oracle.decompress(theirs, target.getvalue()) == content


def test_the_oracle_decodes_what_is_learnt_once_the_last_lane_has_ended(tmp_path: Path) -> None:
    model = integer(hidden=4)
    haste = 50  # symbols until the rate has halved: it changes with each
    model = replace(model, rate=np.array([*model.rate[:2], haste, *model.rate[3:]], dtype=np.int32))
    files.save(tmp_path / "model", model)
    content, target = mixed(371), io.BytesIO()  # 19 lanes of 19 bytes, and one of 10
    archive.compress(io.BytesIO(content), target, Network(model), lanes=20, verify=False)
    theirs = codec_oracle.read_model((tmp_path / "model").read_bytes())
    assert codec_oracle.decompress(theirs, target.getvalue()) == content


def test_the_tables_are_the_oracles() -> None:
    ours = tables()
    assert ours.sigmoid.tolist() == codec_oracle.SIGMOID
    assert ours.tanh.tolist() == codec_oracle.TANH
    assert [*ours.exp.tolist(), 0] == codec_oracle.EXP
