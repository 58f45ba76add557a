"""The console: results apart from the rest, live lines for people, plain ones for files."""

import io
import json
import sys
from collections.abc import Callable

import pytest

from mulstm import console
from mulstm.console import Progress


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Set inside the test: pytest puts its own stderr back between a fixture and a test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return stream


def train(progress: Progress) -> None:
    with progress:
        progress.update(250, bits_per_char=2.5, valid="2.61")
        progress.note("validation [2.61]")
        progress.update(1000, bits_per_char=2.25)


def test_a_program_without_a_console_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        console.note("something")
        console.error("something")
        assert not console.is_live()
        with console.Progress(3, label="x") as screen:
            screen.update(1)


def test_results_go_to_stdout_and_the_rest_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    console.result("1.24")
    console.result_json({"bits": 1.24})
    console.note("reading")
    console.error("This is wrong. Do that.")
    out, err = capsys.readouterr()
    assert out.startswith("1.24\n")
    assert json.loads(out[5:]) == {"bits": 1.24}
    assert err == "reading\nerror: This is wrong. Do that.\n"


def test_json_is_strict() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.result_json({"bits": float("nan")})


def test_json_keeps_letters_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console.result_json({"id": "caf\u00e9"}, indent=None)
    assert capsys.readouterr().out == '{"id": "caf\u00e9"}\n'


def test_plain_lines_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    train(Progress(1000, label="text"))
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("text   25%  2.500 bits/char  valid 2.61  ")
    assert lines[0].endswith(" left")
    assert lines[1] == "validation [2.61]"
    assert "100%  2.250 bits/char" in lines[2]
    assert "left" not in lines[2]
    assert "\r" not in err
    assert "\x1b" not in err


def test_a_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    train(Progress(1000, label="text"))
    console.error("This [bold] is wrong.")
    painted = stream.getvalue()
    assert "\x1b[" in painted
    assert "2.250 bits/char" in painted
    assert "validation [2.61]" in painted
    assert "\x1b[31merror:\x1b[0m This [bold] is wrong." in painted


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    console.error("This is wrong.")
    train(Progress(1000))
    assert "is wrong" in stream.getvalue()
    assert "\x1b[3" not in stream.getvalue()
    assert "\x1b[9" not in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    train(Progress(1000))
    assert [line.strip()[:4] for line in stream.getvalue().splitlines()] == ["25% ", "vali", "100%"]
    assert "\x1b" not in stream.getvalue()


def test_the_time_left_counts_from_where_a_run_was_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    progress = Progress(1000, done=500)
    now[0] += 10.0
    progress.update(600)
    assert progress.line() == " 60%  10 symbols/s  40 s left"
    # What comes after the last update is not held against its speed.
    now[0] += 1000.0
    assert progress.line() == " 60%  10 symbols/s  40 s left"


def test_the_speed_leaves_out_what_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    progress = Progress(1000, done=500, warm_up=20)
    for done in (510, 520):  # slow: something is compiled
        now[0] += 60.0
        progress.update(done, bits_per_char=2.5)
        assert progress.line() == f"{done / 10:3.0f}%  2.500 bits/char"
    now[0] += 1.0
    progress.update(530)
    assert progress.line() == " 53%  2.500 bits/char  10 symbols/s  47 s left"


def test_where_the_end_is_not_known_it_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.time, "monotonic", iter([0.0, 2.0, 2.0]).__next__)
    progress = console.Progress(0, label="compress", unit="bytes")
    progress.update(3_000)
    assert progress.line() == "compress  3.00k bytes  1.50k bytes/s"


def test_the_last_line_is_not_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1000) as progress:
        progress.update(1000)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_tables_align_numbers_right(capsys: pytest.CaptureFixture[str]) -> None:
    console.table(["recipe", "bits"], [["a", "1.2"], ["long", "10.25"], ["none", "-"]])
    assert capsys.readouterr().out.splitlines() == [
        "recipe   bits",
        "------  -----",
        "a         1.2",
        "long    10.25",
        "none        -",
    ]
    console.table(["error"], [["1.5e-05"], ["1,000"], ["7%"]])
    assert capsys.readouterr().out.splitlines()[2:] == ["1.5e-05", "  1,000", "     7%"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0.4 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (3900, "1 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert console.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.7, "1.00k"),
        (23_400, "23.4k"),
        (1_420_000, "1.42M"),
        (456_000_000, "456M"),
        (2e9, "2.00G"),
    ],
)
def test_quantities(count: float, text: str) -> None:
    assert console.quantity(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(88.756, "88.76"), (999_999.4, "999999.40"), (1e6, "1.00e+06"), (3.1e40, "3.10e+40")]
)
def test_decimals(value: float, text: str) -> None:
    assert console.decimal(value, 2) == text


@pytest.mark.parametrize("tell", [console.error, console.note, Progress(9).note])
def test_what_is_told_does_not_command_the_terminal(
    tell: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    tell("no record \x1b[2Jname\x07\u202e. Give\tanother.\nOr none.")
    told = capsys.readouterr().err.removeprefix("error: ")
    assert told == "no record \ufffd[2Jname\ufffd\ufffd. Give\tanother.\nOr none.\n"


def test_labels_and_notes_do_not_command_a_live_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    with Progress(1000, label="\x1b]0;PWN\x07") as progress:
        progress.note("in runs/\x1b]0;PWN\x07")
        progress.update(1000, corpus="\x1b]0;PWN\x07")
    assert stream.getvalue().count("\ufffd]0;PWN\ufffd") >= 3
    assert "\x1b]" not in stream.getvalue()
    assert "\x07" not in stream.getvalue()


def test_a_label_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    train(Progress(1000, label="a[/b][red]"))
    assert "a[/b][red]" in stream.getvalue()


def test_results_command_no_terminal_and_are_whole_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console.result("a\x1b[2J\nb\r")
    assert capsys.readouterr().out == "a\x1b[2J\nb\r\n"
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    console.result("a\x1b[2J\nb\r")
    console.table(["d"], [["\x1be"]])
    assert stream.getvalue() == "a\ufffd[2J\nb\ufffd\nd\n--\n\ufffde\n"


def test_a_name_in_a_row_is_one_field() -> None:
    assert console.in_line("x\ty\nz\x1b[31m") == "x␉y␊z\N{REPLACEMENT CHARACTER}[31m"


def test_spaces_and_joiners_of_other_scripts_stay() -> None:
    text = "10\u00a0euros \u3000 \u0928\u200d"
    assert console.printable(text) == text
