"""sample: what is drawn, what a beam finds, and what an interruption leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from process import Call

from mulstm import cli


def test_sample(call: Call, trained: Path) -> None:
    code, out, err = call("sample", trained, "--prompt", "abda", "--length", 30, "--seed", 3)
    assert code == 0
    assert err == ""
    assert out.startswith("abda")
    assert out == call("sample", trained, "-p", "abda", "-n", 30, "--seed", 3).out
    assert call("sample", trained, "-p", "abda", "-n", 0).out == "abda\n"
    found = json.loads(call("sample", trained, "-n", 9, "--streams", 2, "--json").out)
    assert len(found["texts"]) == 2
    told = call("sample", trained, "-n", 5, "--streams", 2, "-p", "x", "--temperature", 0).out
    assert told.count("--- ") == 2
    for more in (("--json",), ("--streams", 2)):
        code, _, err = call("sample", trained, "--raw", *more)
        assert (code, "need one stream, and no JSON" in err) == (2, True)
    for streams in (1, 2):  # a prompt that is no UTF-8, as the system passes it on
        assert "ab\ufffd" in call("sample", trained, "-n", 5, "-p", "ab\udcff", "--streams", streams).out
    assert (
        json.loads(call("sample", trained, "-n", 5, "-p", "ab\udcff", "--json").out)["prompt"] == "ab\ufffd"
    )


def test_sample_by_a_beam(call: Call, trained: Path) -> None:
    greedy = call("sample", trained, "-p", "ab", "-n", 12, "--temperature", 0).out
    code, out, err = call("sample", trained, "-p", "ab", "-n", 12, "--beam", 1)
    assert (code, out) == (0, greedy)
    assert err.endswith(" nats\n")
    found = json.loads(
        call("sample", trained, "-p", "ab", "-n", 12, "--beam", 8, "--streams", 3, "--json").out
    )
    assert len(found["texts"]) == len(set(found["texts"])) == 3
    assert found["nats"] == sorted(found["nats"])
    told = call("sample", trained, "-p", "ab", "-n", 12, "--beam", 8, "--streams", 3).out
    assert told.startswith(f"--- {found['nats'][0]:.4f} nats ---\nab{found['texts'][0]}\n--- ")
    raw = call("sample", trained, "-p", "ab", "-n", 12, "--beam", 8, "--raw").out
    assert raw == found["texts"][0]
    assert (
        call("sample", trained, "-p", "ab", "-n", 12, "--beam", 8, "--stop", raw[:2]).out == f"ab{raw[:2]}\n"
    )
    for more in (("--temperature", 0.5), ("--top-k", 2), ("--top-p", 0.5), ("--seed", 2)):
        code, _, err = call("sample", trained, "--beam", 2, *more)
        assert (code, "leave temperature, top-k, top-p and seed out" in err) == (2, True)
    for many in (("--beam", 10**6), ("--streams", 10**20)):
        assert call("sample", trained, *many).code == 2
    code, _, err = call("sample", trained, "--beam", 2, "--streams", 3)
    assert (code, "3 texts need a beam as wide" in err) == (2, True)


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt(), "130"), (SystemExit(143), "143")])
def test_streams_that_are_interrupted_are_not_lost(
    end: BaseException,
    code: str,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken_off(*_: object) -> Iterator[list[bytes]]:
        yield [b"one", b"other"]
        raise end

    monkeypatch.setattr("mulstm.sample.sample", broken_off)
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit, match=code):
            cli.run(["sample", str(trained), "--streams", "2", "-p", "ab", *more])
        out = capsys.readouterr().out
        if more:
            assert json.loads(out)["texts"] == ["one", "other"]
        else:
            assert out == "--- 1 ---\nabone\n--- 2 ---\nabother\n"


def test_sample_in_a_precision(call: Call, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr("mulstm.nn.packed.sampler", lambda model, *_, **__: found.append(model.precision))
    assert call("sample", trained, "-n", 5).code == 0
    assert call("sample", trained, "-n", 5, "--precision", "bf16").code == 0
    assert found == ["fp32", "bf16"]
