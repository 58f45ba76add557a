"""The CUDA kernels' arguments in each step, without a GPU: the addresses that an index would give."""

import pytest
import torch

from mulstm.ops import cuda_driver, cuda_steps, eight
from mulstm.ops.cuda_driver import Arguments
from mulstm.ops.triton_chunk import Chunk, Gradients, Saved
from mulstm.ops.triton_plan import Form

T, B, H, P = 3, 2, 64, 5
FORM = Form(128, 64, 4)


class FakeKernel:
    """Takes the place of a loaded kernel and notes what it was launched with."""

    def __init__(self) -> None:
        self.seen: list[dict[str, int | None]] = []

    def arguments(self, x, W, fault) -> Arguments:
        return Arguments(B=x.shape[1], N=W.shape[0])

    def launcher(self, arguments):
        names = [name for name, *_ in Arguments._fields_[2:] if name not in ("rest", "fault")]
        return lambda: self.seen.append({name: getattr(arguments, name) for name in names})


@pytest.fixture
def launched(monkeypatch):
    work = FakeKernel()
    monkeypatch.setattr(cuda_steps, "kernel", lambda variant, device: work)
    return work.seen


def chunk_of(indexed: bool, save: bool = True) -> tuple[Chunk, Saved, Gradients, torch.Tensor]:
    x = torch.zeros(P, 5 * H, dtype=torch.bfloat16) if indexed else torch.zeros(T, B, 5 * H).bfloat16()
    rows = torch.zeros(T, B, dtype=torch.int32) if indexed else None
    mask, W = torch.ones(B, H), torch.zeros(4 * H, H).bfloat16()
    chunk = Chunk(
        x[..., :H],
        x[..., H:],
        None,
        W[:H],
        W,
        torch.zeros(B, H),
        torch.zeros(B, H),
        mask,
        None,
        "standard",
        rows,
    )
    kept, places = (T, T + 1) if save else (1, 2)
    a, c = torch.zeros(kept, B, H).bfloat16(), torch.zeros(places, B, H)
    h, z = torch.zeros(T + 1, B, H).bfloat16(), torch.zeros(T if save else 0, B, 4 * H).half()
    saved = Saved(h, c, z, a, torch.zeros_like(a), torch.zeros(0))
    dx = torch.zeros(T, B, 5 * H).bfloat16()
    da, none = torch.zeros(T, B, H).bfloat16(), torch.zeros(B, H)
    return chunk, saved, Gradients(dx, dx[..., :H], dx[..., H:], dx[..., H:], da, None, none, none, None), dx


def at(x: torch.Tensor) -> int:
    return x.data_ptr()


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("save", [False, True])
def test_forward(launched, indexed, save) -> None:
    chunk, saved, *_ = chunk_of(indexed, save)
    m = cuda_steps.m_step(chunk, saved, FORM, save)
    gates = cuda_steps.gates_step(chunk, saved, FORM, save)
    for t in range(T):
        m(t)
        gates(t)
    for t in range(T):
        k, i, j = t % saved.a.shape[0], t % saved.c.shape[0], (t + 1) % saved.c.shape[0]
        rows = None if chunk.rows is None else at(chunk.rows[t])
        first, second = launched[2 * t], launched[2 * t + 1]
        assert first["x0"] == at(chunk.mx if indexed else chunk.mx[t])
        assert (first["rows"], second["rows"]) == (rows, rows)
        assert (first["y0"], first["y1"], first["row"]) == (at(saved.a[k]), at(saved.m[k]), t * B)
        assert second["x0"] == at(chunk.zx if indexed else chunk.zx[t])
        assert (second["x1"], second["y1"]) == (at(saved.c[i]), at(saved.c[j]))
        assert (second["x2"], second["x3"]) == (at(chunk.mask), None)
        assert (second["y0"], second["y2"]) == (at(saved.z[t]) if save else None, at(saved.h[t + 1]))
        assert (second["row"], second["stride_x"]) == (k * B, 5 * H)


def test_backward(launched) -> None:
    chunk, saved, out, dx = chunk_of(indexed=False)
    wide = torch.zeros(T, B, 2 * H).bfloat16()
    dh = wide[..., H:]  # a view with steps of its own
    dm, cell = cuda_steps.dm_step(chunk, saved, out, FORM), cuda_steps.cell_step(chunk, saved, dh, out, FORM)
    parts, product = cuda_steps.sums(out.dr, chunk.W_zm, FORM)
    for t in range(T - 1, 0, -1):
        dm(t)
        cell(t)
        product(t)
        first, second, third = launched[-3:]
        assert (first["x0"], first["x1"]) == (at(chunk.mx[t]), at(saved.a[t]))
        assert (first["y0"], first["y1"], first["stride_y"]) == (at(out.da[t]), at(dx[t]), 5 * H)
        assert (second["x0"], second["x1"], second["x2"]) == (
            at(saved.z[t - 1]),
            at(saved.c[t - 1]),
            at(saved.c[t]),
        )
        assert (second["x4"], second["y1"]) == (at(dh[t - 1]), at(out.dz[t - 1]))
        assert (second["x3"], second["x5"], second["y0"]) == (at(chunk.mask), None, at(out.dc_0))
        assert (third["y0"], third["row"]) == (at(parts), t * B)


def test_a_launch_reads_the_arguments_of_its_time(monkeypatch) -> None:
    seen = []

    class Driver:
        def cuLaunchKernelEx(self, config, function, parameters, extra) -> int:
            seen.append(Arguments.from_address(parameters[0]).row)
            return 0

    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(cuda_driver, "_driver", Driver)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    work = cuda_driver.Kernel.__new__(cuda_driver.Kernel)
    work.variant = cuda_driver.Variant(FORM, "sums")
    work.function, work.attributes = None, (cuda_driver._Attribute * 2)()
    arguments = Arguments(B=B, N=H)
    launch = work.launcher(arguments)
    for row in (0, 4, 2):
        arguments.row = row
        launch()
    assert seen == [0, 4, 2]


def test_8_bit_products(launched) -> None:
    chunk, saved, *_ = chunk_of(indexed=True)
    h, m = (torch.zeros(1, B, H).to(eight.E4M3) for _ in range(2))
    operands = eight.Operands(h, m)
    steps = [make(chunk, saved, FORM, True, operands) for make in (cuda_steps.m_step, cuda_steps.gates_step)]
    for t in range(T):
        for step in steps:
            step(t)
    assert [one["row"] for one in launched] == [0] * 2 * T  # one place for all steps
    assert [one["y8"] for one in launched] == [at(m), at(h)] * T
    to_m, to_z = launched[2:4]
    assert to_m["y1"] == at(saved.m[1])
    assert to_z["y2"] == at(saved.h[2])
    # What is multiplied by its scale in the one is divided by it in the other.
    assert to_m["scale"] * eight.WEIGHT * to_z["undo"] == 1
    assert to_z["scale"] * eight.WEIGHT * to_m["undo"] == 1
    assert to_m["factor"] is None


def test_8_bit_sums(launched) -> None:
    x, W, factor = (
        torch.zeros(1, B, 4 * H).to(eight.E5M2),
        torch.zeros(H, 4 * H).to(eight.E4M3),
        torch.ones(1),
    )
    out, step = cuda_steps.sums_in_eight(x, W, factor, Form(128, 64, 4, parts=3))
    step(2)
    assert out.shape == (3, B, H)
    assert out.dtype == torch.bfloat16
    (one,) = launched
    assert (one["y0"], one["factor"], one["row"]) == (at(out), at(factor), 0)
    assert one["undo"] == 1 / eight.WEIGHT
