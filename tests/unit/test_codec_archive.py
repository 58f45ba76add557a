"""Archives: what goes in comes out."""

from __future__ import annotations

import hashlib
import io
import random
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from codec_models import golden, integer, mixed, packed, unpacked
from mulstm.codec import archive, block
from mulstm.codec.measure import integer_bits
from mulstm.codec.network import Network
from mulstm.data.alphabet import Alphabet
from mulstm.errors import BackendError, CheckFailedError, DataError, RunError

LETTERS = Alphabet(b" abcdefghijklmnopqrstuvwxyz")
# Bytes, as docs/codec.md has them: header and seal with what frames them; what frames one block.
OVERHEAD, BLOCK_OVERHEAD = 128, 28


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(integer())


@pytest.mark.parametrize("adaptive", [False, True])
def test_written_one_way_read_another(network: Network, adaptive: bool) -> None:
    content = mixed(400)
    data = packed(content, network, lanes=40, adaptive=adaptive)
    other = Network(network.model, products="float32", compiled=False)
    assert packed(content, other, lanes=40, adaptive=adaptive, coder="python") == data
    if find_spec("constriction"):
        assert packed(content, network, lanes=40, adaptive=adaptive, coder="constriction") == data
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert unpacked(data, other, coder="python") == content
        assert packed(content, network, lanes=40, adaptive=adaptive) == data
    finally:
        torch.set_num_threads(before)
    assert unpacked(data, network) == content


def test_bytes_outside_the_alphabet_go_through_the_escape() -> None:
    network = Network(integer(LETTERS))
    for content in (bytes(range(256)), b"\x00" * 300, mixed(2_000), b"plain text " * 40 + b"\xff"):
        for adaptive in (False, True):
            assert unpacked(packed(content, network, lanes=7, adaptive=adaptive), network) == content


def test_escapes_cost_little_where_there_are_none_and_are_learnt_where_there_are_many() -> None:
    network = Network(integer(LETTERS))
    bits = [
        len(block.encode(network, text, 1, False)) * 8 / 2_000 for text in (b"ab" * 1000, b"\xfe\xff" * 1000)
    ]
    plain = integer_bits(network, torch.tensor([LETTERS.encode(b"ab" * 1000).tolist()])) / 2_000
    assert bits[0] < plain + 0.03
    assert bits[1] < 8.1  # log2(229) for the byte itself, next to nothing for the escape


def test_aliases_do_not_lose_the_difference() -> None:
    network = Network(integer(Alphabet(b"abX", ("start", "stop"), aliases=b"ZX")))
    assert unpacked(packed(b"XZXZab" * 20, network, lanes=4), network) == b"XZXZab" * 20


def test_size_is_the_cross_entropy_and_the_header(network: Network) -> None:
    content = mixed(8_000)
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long().view(20, 400)
    ideal = integer_bits(network, text) / 8
    size = len(packed(content, network, lanes=20, adaptive=False))
    assert 0 <= size - (OVERHEAD + BLOCK_OVERHEAD) - ideal <= 0.002 * ideal + 8


def test_adapting_pays_on_what_repeats(network: Network) -> None:
    content = mixed(12_000)
    still, learning = (len(packed(content, network, lanes=60, adaptive=a)) for a in (False, True))
    assert learning < 0.6 * still


def test_what_does_not_compress_is_stored(network: Network) -> None:
    content = random.Random(0).randbytes(5_000)
    for adaptive in (False, True):
        how = {"block": 2_000, "lanes": 200, "adaptive": adaptive}
        done = archive.compress(io.BytesIO(content), io.BytesIO(), network, **how)
        assert done.stored == 3
        assert done.archive == len(content) + OVERHEAD + 3 * BLOCK_OVERHEAD
    assert unpacked(packed(content, network, block=2_000, lanes=200), network) == content


@pytest.mark.parametrize("content", [random.Random(0).randbytes(300), b""], ids=["stored", "empty"])
def test_all_of_the_time_counts(content: bytes, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored takes no time to decode, but still to read and write: a speed is made of it."""
    clock = [0]

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            clock[0] += 1
            return super().read(size)

    monkeypatch.setattr(archive, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    there = archive.compress(Slow(content), target := io.BytesIO(), network, lanes=3)
    assert (there.stored, there.seconds) == (len(content) > 0, clock[0])
    clock[0] = 0
    back = archive.decompress(Slow(target.getvalue()), io.BytesIO(), network)
    assert back.seconds == clock[0] > 0


def test_lanes_fit_the_length(network: Network) -> None:
    assert [archive.default_lanes(n) for n in (1, 8_191, 40_000, 10**9)] == [1, 1, 4, 64]
    assert [archive.default_lanes(n, "cuda") for n in (1, 40_000, 10**9)] == [1, 4, 256]
    for lanes in (0, 20_000):
        with pytest.raises(DataError, match=f"{lanes}"):
            packed(b"x", network, lanes=lanes)
    with pytest.raises(DataError, match="0 bytes"):
        packed(b"x", network, block=0)


def test_reading_and_writing_go_block_by_block(network: Network) -> None:
    """No more than a block is asked for, and it is written before the next is read: memory stays flat."""

    written = []  # when each block is first asked for

    class Source(io.RawIOBase):
        left = 500

        def read(self, size: int = -1) -> bytes:
            assert 0 < size <= 64
            if self.left and (500 - self.left) % 64 == 0:
                written.append(len(target.getvalue()))
            give = min(size, 48, self.left)  # less than asked for, as a pipe does
            self.left -= give
            return b"x" * give

    target = io.BytesIO()
    done = archive.compress(Source(), target, network, block=64, lanes=4)  # type: ignore[arg-type]
    assert (done.content, done.blocks, done.verified) == (500, 8, True)
    assert unpacked(target.getvalue(), network) == b"x" * 500
    assert len(written) == 8
    assert all(before < after for before, after in pairwise(written))


def test_progress_counts_what_was_only_stored(network: Network) -> None:
    told: list[int] = []
    content = random.Random(1).randbytes(250)
    made = packed(content, network, block=100)
    archive.decompress(io.BytesIO(made), io.BytesIO(), network, progress=told.append)
    assert sum(told) == 250


def test_verifying_is_timed_apart(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, real = [0.0], block.decode

    def slow(*given: Any, **more: Any) -> bytes:
        clock[0] += 5
        return real(*given, **more)

    monkeypatch.setattr(block, "decode", slow)
    monkeypatch.setattr(archive, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    done = archive.compress(io.BytesIO(b"x" * 200), io.BytesIO(), network, block=100, lanes=3)
    assert (done.seconds, done.verify_seconds) == (0, 10)


def test_the_most_lanes_of_any_block_are_told(network: Network) -> None:
    content = b"x" * 100 + random.Random(0).randbytes(100)  # the last block is stored, in one
    done = archive.compress(io.BytesIO(content), io.BytesIO(), network, block=100, lanes=3)
    assert (done.stored, done.lanes) == (1, 3)


@pytest.mark.parametrize("verify", [False, True])
def test_progress_counts_the_way_back(network: Network, verify: bool) -> None:
    told: list[int] = []
    content = b"x" * 300 + random.Random(0).randbytes(100)  # the last block is stored
    packed(content, network, block=100, lanes=3, verify=verify, progress=told.append)
    assert sum(told) == 400 * (2 if verify else 1)


def test_the_bytes_of_an_archive_are_those_of_this_version() -> None:
    """A change here is a change of format: it needs a new version, and the old one must stay readable."""
    network = Network(golden())
    assert (
        network.model.fingerprint.hex() == "9e065b2df8841c2c54579579d317a839639e6d0deb412b16b09238084155f836"
    )
    for adaptive, expected in (
        (False, "0a227c345ab5099898bf3cb759892458"),
        (True, "b0f7b357ce6378641fa47fb4fd9897fd"),
    ):
        data = packed(mixed(600), network, lanes=5, adaptive=adaptive)
        assert hashlib.sha256(data).hexdigest()[:32] == expected


def test_and_those_of_a_model_that_learns_gently() -> None:
    """Two layers, a rate below its bound and fewer bits of h left out; a text that needs a larger table."""
    network = Network(golden(32, hidden=96, layers=2, skip=True, embedding=0, weight_norm=False))
    assert network.model.rate.tolist() == [41034, 6839, 20000, 6]
    assert (
        network.model.fingerprint.hex() == "14b07046bd8b29d65d4f9ec8f7cd38039410ae6b84c2c05f94cb39a914d83fbe"
    )
    for adaptive, expected in (
        (False, "7c4723a756b1fa3a108301145e75847d"),
        (True, "d61c208daf9f1ff5eb1bd54805f9402f"),
    ):
        data = packed(mixed(6_000), network, lanes=40, adaptive=adaptive)
        assert hashlib.sha256(data).hexdigest()[:32] == expected


def test_a_pipe_may_give_less_than_it_is_asked_for(network: Network) -> None:
    class Pipe(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or 0, 7))

    target = io.BytesIO()
    archive.decompress(Pipe(packed(mixed(90), network, block=50, lanes=10)), target, network)
    assert target.getvalue() == mixed(90)


def test_files_are_there_whole_or_not_at_all(tmp_path: Path, network: Network) -> None:
    source, packed_, out = tmp_path / "a.txt", tmp_path / "a.mul", tmp_path / "out"
    source.write_bytes(mixed(500))
    done = archive.compress_path(source, packed_, network, lanes=20)
    assert (done.content, done.archive) == (500, packed_.stat().st_size)
    assert archive.peek(packed_).length == 500  # type: ignore[union-attr]
    packed_.write_bytes(packed_.read_bytes()[:-3])
    out.write_bytes(b"before")
    with pytest.raises(CheckFailedError):
        archive.decompress_path(packed_, out, network)
    assert out.read_bytes() == b"before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.mul", "a.txt", "out"]
    with pytest.raises(DataError, match=r"nothing\.txt"):
        archive.compress_path(tmp_path / "nothing.txt", packed_, network)
    with pytest.raises(RunError, match="no-folder"):
        archive.compress_path(source, tmp_path / "no-folder" / "x", network)


class Reluctant(io.RawIOBase):
    """A stream without a buffer: it takes little at a time, and at last nothing."""

    def __init__(self, room: int) -> None:
        self.room, self.taken = room, b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int | None:
        piece = bytes(data[: min(100, self.room)])
        self.room -= len(piece)
        self.taken += piece
        return len(piece) or None


def test_streams_without_a_buffer_get_everything(network: Network) -> None:
    data = packed(mixed(3_000), network, lanes=30)
    whole = Reluctant(1 << 20)
    archive.compress(io.BytesIO(mixed(3_000)), whole, network, lanes=30, verify=False)  # type: ignore[arg-type]
    assert whole.taken == data
    back = Reluctant(1 << 20)
    archive.decompress(io.BytesIO(data), back, network)  # type: ignore[arg-type]
    assert back.taken == mixed(3_000)
    for work, given in ((archive.compress, mixed(3_000)), (archive.decompress, data)):
        with pytest.raises(DataError, match="does not wait for room"):
            work(io.BytesIO(given), Reluctant(700), network)  # type: ignore[operator]


def test_a_source_that_has_nothing_yet_is_not_taken_for_its_end(network: Network) -> None:
    class Hasty(io.BytesIO):
        def read(self, size: int | None = -1, /) -> Any:
            return super().read(min(size or 0, 50)) or None

    for work, given in (
        (archive.compress, mixed(300)),
        (archive.decompress, packed(mixed(300), network)[:200]),
    ):
        with pytest.raises(DataError, match="does not wait for its bytes"):
            work(Hasty(given), io.BytesIO(), network)  # type: ignore[operator]


def test_an_archive_is_shown_to_nobody_who_may_not_read_its_source(tmp_path: Path, network: Network) -> None:
    source, made, out = tmp_path / "a", tmp_path / "a.mul", tmp_path / "out"
    source.write_bytes(mixed(300))
    source.chmod(0o600)
    archive.compress_path(source, made, network, lanes=20)
    archive.decompress_path(made, out, network)
    assert [path.stat().st_mode & 0o777 for path in (made, out)] == [0o600, 0o600]
    source.chmod(0o400)
    out.chmod(0o640)  # a file that is there keeps what it has
    archive.decompress_path(made, out, network)
    assert out.stat().st_mode & 0o777 == 0o640
    archive.compress_path(source, tmp_path / "b.mul", network, lanes=20)
    assert (tmp_path / "b.mul").stat().st_mode & 0o777 == 0o400


def test_lanes_are_those_that_there_are(network: Network) -> None:
    for lanes, expected in ((30, 30), (16_384, 300)):
        done = archive.compress(io.BytesIO(mixed(300)), io.BytesIO(), network, lanes=lanes, verify=False)
        assert (done.stored, done.lanes) == (0, expected)


def test_a_coder_that_is_not_there_is_told_of_an_empty_file_too(network: Network) -> None:
    with pytest.raises(BackendError, match="There is no coder 'foo'"):
        packed(b"", network, coder="foo")


def test_a_file_that_grows_meanwhile_is_told(network: Network) -> None:
    with pytest.raises(CheckFailedError, match="changed meanwhile"):
        packed(b"abc", network, length=2)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="this system has no /proc")
def test_a_source_that_cannot_be_read_is_not_blamed_on_the_target(tmp_path: Path, network: Network) -> None:
    with pytest.raises(DataError, match=r"/proc/self/mem cannot be read \(Input/output error\)"):
        archive.compress_path(Path("/proc/self/mem"), tmp_path / "out", network)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc")
def test_files_that_do_not_tell_their_length(tmp_path: Path, network: Network) -> None:
    source, target = Path("/proc/self/status"), tmp_path / "out"
    assert source.stat().st_size == 0
    assert archive.compress_path(source, target, network).content > 100
    (tmp_path / "empty").touch()
    assert archive.length_of(tmp_path / "empty") == 0
