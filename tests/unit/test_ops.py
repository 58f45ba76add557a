"""recurrence() says what does not fit, and never swaps a backend silently."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mulstm.errors import BackendError
from mulstm.ops import BACKENDS, State, chosen, modes, objections, recurrence

T, B, H = 3, 2, 4


def given(**changes: object) -> dict[str, object]:
    chunk: dict[str, object] = {
        "mx": torch.randn(T, B, H),
        "zx": torch.randn(T, B, 4 * H),
        "W_mh": torch.randn(H, H),
        "W_zm": torch.randn(4 * H, H),
        "state": State(torch.zeros(B, H), torch.zeros(B, H)),
    }
    return chunk | changes


def test_auto_takes_the_first_without_objection() -> None:
    zx = torch.randn(T, B, 4 * H)
    assert chosen(zx) == "fused"
    assert chosen(zx, torch.ones(B, H, requires_grad=True)) == "reference"
    assert chosen(zx, backend="reference") == "reference"
    assert chosen(zx.half()) == "reference"


def test_a_backend_asked_by_name_runs_or_says_why_not() -> None:
    with pytest.raises(BackendError, match="'triton' cannot run here: it needs a CUDA device"):
        recurrence(**given(), backend="triton")
    with pytest.raises(BackendError, match="no gradient for the mask"):
        recurrence(**given(), mask=torch.ones(B, H, requires_grad=True), backend="fused")
    with pytest.raises(BackendError, match=r"no backend 'cudnn'.*triton, fused, reference"):
        recurrence(**given(), backend="cudnn")


def test_a_wider_c_stays_wide() -> None:
    chunk = given(state=State(torch.zeros(B, H), torch.randn(B, H, dtype=torch.float64)))
    (h, state), (right, end) = (recurrence(**chunk, backend=name) for name in ("fused", "reference"))
    torch.testing.assert_close(h, right)
    torch.testing.assert_close(state.c, end.c, atol=1e-6, rtol=1e-6)


def test_kernels_are_not_asked_for_no_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that only say they are on a GPU: nothing is computed here."""
    monkeypatch.setattr(modes, "objection", lambda: None)  # to fake tensors
    with FakeTensorMode(), torch.device("cuda"):
        zx = torch.zeros(T, 0, H, dtype=torch.bfloat16)
        assert chosen(zx) == "fused"
        with pytest.raises(BackendError, match="there are no lanes"):
            chosen(zx, backend="triton")


def test_objections() -> None:
    found = objections("cpu", "bf16")
    assert list(found) == list(BACKENDS)
    assert found["fused"] is None
    assert found["reference"] is None
    assert "CUDA" in str(found["triton"])
    if not torch.cuda.is_available():
        assert all("no device 'cuda'" in str(why) for why in objections("cuda").values())


def test_a_mask_that_wants_a_gradient_gets_one_from_the_reference() -> None:
    mask = torch.ones(B, H, requires_grad=True)
    h, _ = recurrence(**given(), mask=mask)
    h.sum().backward()
    assert mask.grad is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zx": torch.zeros(0, B, 4 * H)}, r"zx must be \(T, B, width\) with T > 0"),
        ({"zx": torch.zeros(T, B, 4 * H + 1)}, "zx has shape"),
        ({"mx": None}, "mx and W_mh go together"),
        ({"mx": torch.zeros(T, B, H + 1)}, r"mx has shape \(3, 2, 5\).*must be \(3, 2, 4\)"),
        ({"W_zm": torch.zeros(4 * H, H + 1)}, "W_zm has shape"),
        ({"W_mh": torch.zeros(H, H, dtype=torch.float64)}, "W_mh is torch.float64 and zx torch.float32"),
        ({"mask": torch.zeros(B + 1, H)}, "mask has shape"),
        ({"b_h": torch.zeros(H)}, 'b_h belongs to the unit "initial"'),
        ({"unit": "gru"}, "no unit 'gru'"),
        ({"unit": "tanh"}, "has shape"),
        ({"state": State(torch.zeros(B, H), torch.zeros(B, H, dtype=torch.bfloat16))}, "less than float32"),
        ({"state": State(torch.zeros(B, H), torch.zeros(B, 0))}, "state.c has shape"),
        ({"W_zm": torch.zeros(4 * H, H, device="meta")}, "W_zm is on meta"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_does_not_fit(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recurrence(**given(**changes))


def test_a_plain_pair_is_a_state() -> None:
    chunk = given()
    pair = chunk | {"state": tuple(chunk["state"])}  # type: ignore[arg-type]
    assert recurrence(**pair)[0].equal(recurrence(**chunk)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_autocast_casts_nothing_that_the_caller_has_chosen(backend: str) -> None:
    torch.manual_seed(1)
    T, B, H = 5, 2, 7
    given = torch.randn(T, B, H), torch.randn(T, B, 4 * H), torch.randn(H, H), torch.randn(4 * H, H)
    state = State(torch.randn(B, H), torch.randn(B, H))
    right = recurrence(*given, state, backend=backend)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(recurrence(*given, state, backend=backend)[0], right)
