"""MultiplicativeLSTM is called as torch.nn.LSTM is: shapes, packed sequences, directions, states."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from mulstm.errors import BackendError
from mulstm.nn import MultiplicativeLSTM, MultiplicativeLSTMCell
from mulstm.ops import State
from mulstm.ops.reference import step

E, H = 5, 6
LENGTHS = [4, 7, 1, 7, 2]


def make(**options: object) -> MultiplicativeLSTM:
    torch.manual_seed(4)
    return MultiplicativeLSTM(E, H, dtype=torch.float64, **options)


def by_hand(
    layer: MultiplicativeLSTM, x: torch.Tensor, h_0: torch.Tensor, c_0: torch.Tensor
) -> list[torch.Tensor]:
    """One sequence (T, E) through every layer and direction with the reference's single step."""
    directions = 2 if layer.bidirectional else 1
    h_n, c_n = [], []
    for k in range(layer.num_layers):
        outputs = []
        for d in range(directions):
            j = k * directions + d
            w = layer.stack[j].weights(torch.float64)
            state, hs = State(h_0[j][None], c_0[j][None]), []
            for x_t in x.flip(0) if d else x:
                state = step(
                    (x_t @ w.W_mx.T)[None], (x_t @ w.W_zx.T + w.b_z)[None], w.W_mh, w.W_zm, state,
                    b_h=w.b_h, unit=layer.unit,
                )  # fmt: skip
                hs.append(state.h[0])
            outputs.append(torch.stack(hs[::-1] if d else hs))
            h_n.append(state.h[0])
            c_n.append(state.c[0])
        x = torch.cat(outputs, dim=1)
    return [x, torch.stack(h_n), torch.stack(c_n)]


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2}, {"num_layers": 2, "bidirectional": True}], ids=str
)
@pytest.mark.parametrize("how", ["batch", "batch_first", "single", "packed", "packed sorted"])
@pytest.mark.parametrize("given", [True, False])
def test_every_form_of_input(options: dict[str, object], how: str, given: bool) -> None:
    layer = make(**options, batch_first=how == "batch_first", weight_norm=True)
    twin = torch.nn.LSTM(E, H, dtype=torch.float64, **options, batch_first=how == "batch_first")
    lengths = [6, 6, 6] if "batch" in how else [6] if how == "single" else LENGTHS
    lengths = sorted(lengths, reverse=True) if how == "packed sorted" else lengths
    xs = [torch.randn(n, E, dtype=torch.float64) for n in lengths]
    n_states = len(layer.layers)
    h_0, c_0 = (torch.randn(n_states, len(xs), H, dtype=torch.float64) * given for _ in range(2))
    if how == "single":
        x, hx = xs[0], (h_0[:, 0], c_0[:, 0])
    else:
        hx = (h_0, c_0)
        x = (
            pack_sequence(xs, enforce_sorted=how == "packed sorted")
            if how.startswith("packed")
            else torch.stack(xs, dim=0 if how == "batch_first" else 1)
        )
    y, (h_n, c_n) = layer(x, hx if given else None)
    theirs, (their_h, their_c) = twin(x, hx if given else None)
    assert (h_n.shape, c_n.shape) == (their_h.shape, their_c.shape)
    assert type(y) is type(theirs)
    if isinstance(y, PackedSequence):
        assert torch.equal(y.batch_sizes, theirs.batch_sizes)
        padded, found = pad_packed_sequence(y)
        assert found.tolist() == lengths
        rows = [padded[:n, b] for b, n in enumerate(lengths)]
    else:
        assert y.shape == theirs.shape
        rows = [y] if how == "single" else list(y if how == "batch_first" else y.transpose(0, 1))
    for b, (row, seq) in enumerate(zip(rows, xs, strict=True)):
        right, right_h, right_c = by_hand(layer, seq, h_0[:, b], c_0[:, b])
        torch.testing.assert_close(row, right)
        torch.testing.assert_close(h_n if how == "single" else h_n[:, b], right_h)
        torch.testing.assert_close(c_n if how == "single" else c_n[:, b], right_c)


def test_gradients_through_packed_sequences() -> None:
    layer = make(bidirectional=True, unit="initial")
    xs = [torch.randn(n, E, dtype=torch.float64, requires_grad=True) for n in LENGTHS]
    y, (h_n, c_n) = layer(pack_sequence(xs, enforce_sorted=False))
    inputs = [*xs, *layer.parameters()]
    found = torch.autograd.grad(y.data.square().sum() + h_n.sum() + c_n.sum(), inputs)
    zeros = torch.zeros(2, H, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for x in xs:
        right, right_h, right_c = by_hand(layer, x, zeros, zeros)
        loss = loss + right.square().sum() + right_h.sum() + right_c.sum()
    for a, b in zip(found, torch.autograd.grad(loss, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_padded_batch_first_packing() -> None:
    layer = make()
    x = torch.randn(len(LENGTHS), max(LENGTHS), E, dtype=torch.float64)
    y, _ = layer(pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False))
    padded, _ = pad_packed_sequence(y, batch_first=True)
    torch.testing.assert_close(padded[2, :1], layer(x[2, :1])[0])
    assert not padded[2, 1:].any()


@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.5}], ids=str
)
def test_a_batch_of_nothing(options: dict[str, object], dtype: torch.dtype, backend: str) -> None:
    layer = MultiplicativeLSTM(E, H, dtype=dtype, weight_norm=True, backend=backend, **options)
    twin = torch.nn.LSTM(E, H, dtype=dtype, **options)
    x = torch.zeros((0, 4, E) if layer.batch_first else (4, 0, E), dtype=dtype, requires_grad=True)
    y, (h_n, c_n) = layer(x)
    theirs, (their_h, their_c) = twin(x)
    assert (y.shape, h_n.shape, c_n.shape) == (theirs.shape, their_h.shape, their_c.shape)
    (y.sum() + h_n.sum() + c_n.sum()).backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
    with torch.no_grad():
        assert layer.eval()(x, (h_n, c_n))[0].shape == theirs.shape


def test_a_cell_with_a_batch_of_nothing() -> None:
    cell = MultiplicativeLSTMCell(E, H)
    h, c = cell(torch.zeros(0, E))
    assert h.shape == c.shape == (0, H)
    (h.sum() + c.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in cell.parameters())


def test_dropout_is_between_layers_and_only_in_training() -> None:
    layer = make(num_layers=2, dropout=0.5)
    x = torch.randn(4, 3, E, dtype=torch.float64)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    (h_1, _), (h_2, _) = layer(x)[1], layer(x)[1]
    assert torch.equal(h_1[0], h_2[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_without_bias() -> None:
    layer = make(bias=False)
    assert not any("b_" in name for name, _ in layer.named_parameters())
    assert set(layer.state_dict()) == {"layers.0.W_zx", "layers.0.W_zm", "layers.0.W_mx", "layers.0.W_mh"}
    layer(torch.randn(2, 1, E, dtype=torch.float64))


def test_start() -> None:
    layer = make()
    b = layer.stack[0].b_z.chunk(4)
    assert bool((b[3] == 3).all())
    assert not torch.cat(b[:3]).any()
    W = layer.stack[0].get_parameter("W_mh")
    torch.testing.assert_close(W @ W.T, torch.eye(H, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("weight_norm", [True, False])
def test_cell_is_a_step_of_the_layer(weight_norm: bool) -> None:
    layer = make(weight_norm=weight_norm)
    cell = MultiplicativeLSTMCell(E, H, dtype=torch.float64, weight_norm=weight_norm)
    cell.load_state_dict(layer.state_dict())
    x = torch.randn(4, 3, E, dtype=torch.float64)
    right, (h_n, c_n) = layer(x)
    for module in (cell, cell.eval()):
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                state = None
                for t in range(4):
                    state = module(x[t], state)
                    torch.testing.assert_close(state[0], right[t])
                torch.testing.assert_close(state, (h_n[0], c_n[0]))
    h, c = cell(x[0, 0], (torch.zeros(H, dtype=torch.float64), torch.zeros(H, dtype=torch.float64)))
    assert h.shape == c.shape == (H,)
    torch.testing.assert_close(h, right[0, 0])


def test_kept_weights_follow_the_parameters() -> None:
    layer = make(weight_norm=True).eval()
    x = torch.randn(1, 2, E, dtype=torch.float64)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    with torch.no_grad():
        before = layer(x)[0]
        assert torch.equal(layer(x)[0], before)
    layer(x)[0].sum().backward()
    optimiser.step()
    with torch.no_grad():
        after = layer(x)[0]
        fresh = copy.deepcopy(layer)(x)[0]
    assert not torch.equal(before, after)
    assert torch.equal(fresh, after)


def test_bf16_and_autocast() -> None:
    x = torch.randn(4, 3, E)
    layer = make().float()
    right, _ = layer(x)
    y, (h_n, c_n) = copy.deepcopy(layer).bfloat16()(x.bfloat16())
    assert (y.dtype, h_n.dtype, c_n.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(y.float(), right, atol=0.02, rtol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        z, _ = layer(x)
        z.sum().backward()
    assert z.dtype == torch.bfloat16
    torch.testing.assert_close(z.float(), right, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: MultiplicativeLSTM(E, H, proj_size=3), "proj_size is 3"),
        (lambda: MultiplicativeLSTM(0, H), "input_size is 0"),
        (lambda: MultiplicativeLSTM(E, H, num_layers=0), "num_layers is 0"),
        (lambda: MultiplicativeLSTM(E, H, dropout=1.0), "dropout is 1.0"),
        (lambda: MultiplicativeLSTM(E, H, unit="tanh"), "no unit 'tanh'"),
        (
            lambda: MultiplicativeLSTM(E, H)(torch.zeros(2, 3, E + 1)),
            "last dimension is 6, and input_size is 5",
        ),
        (lambda: MultiplicativeLSTM(E, H)(torch.zeros(E)), "has 1 dimensions"),
        (lambda: MultiplicativeLSTM(E, H)(torch.zeros(0, 3, E)), "no steps"),
        (
            lambda: MultiplicativeLSTM(E, H)(
                torch.zeros(2, 3, E), (torch.zeros(1, 2, H), torch.zeros(1, 3, H))
            ),
            r"h_0 has shape \(1, 2, 6\). Give \(1, 3, 6\)",
        ),
        (
            lambda: MultiplicativeLSTM(E, H)(torch.zeros(2, E), (torch.zeros(1, H), torch.zeros(1, H + 1))),
            r"c_0 has shape \(1, 7\). Give \(1, 6\)",
        ),
        (lambda: MultiplicativeLSTMCell(E, H)(torch.zeros(1, 2, E)), "has 3 dimensions"),
        (
            lambda: MultiplicativeLSTM(E, H)(torch.zeros(2, E), (torch.zeros(1, 1, H),) * 2),
            r"h_0 has shape \(1, 1, 6\). Give \(1, 6\)",
        ),
        (
            lambda: MultiplicativeLSTM(E, H)(torch.zeros(2, E), (torch.zeros(H),) * 2),
            r"h_0 has shape \(6,\). Give \(1, 6\)",
        ),
        (
            lambda: MultiplicativeLSTM(E, H)(torch.zeros(2, 3, E), (torch.zeros(1, 3, H),) * 3),
            r"state's length is 3. Give two tensors, \(h_0, c_0\)",
        ),
        (
            lambda: MultiplicativeLSTM(E, H)(torch.zeros(2, 3, E), (torch.zeros(1, 3, H), None)),
            "c_0 is a NoneType. Give two tensors",
        ),
        (
            lambda: MultiplicativeLSTMCell(E, H)(torch.zeros(2, E), (torch.zeros(2, H), torch.zeros(3, H))),
            r"c_0 has shape \(3, 6\). Give \(2, 6\)",
        ),
        (
            lambda: MultiplicativeLSTMCell(E, H)(torch.zeros(E), (torch.zeros(1, H),) * 2),
            r"h_0 has shape \(1, 6\). Give \(6,\)",
        ),
    ],
    ids=range(17),
)
def test_what_does_not_fit(make_it: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_it()  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_types_are_not_cast_in_silence(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, E)
    for module, one, h in (
        (MultiplicativeLSTM(E, H), x, torch.zeros(1, 3, H)),
        (MultiplicativeLSTMCell(E, H), x[0], torch.zeros(3, H)),
    ):
        with pytest.raises(ValueError, match=f"The input is {dtype} and the weights are torch.float32"):
            module(one.to(dtype))
        for name, hx in (("h_0", (h.to(dtype), h)), ("c_0", (h, h.to(dtype)))):
            with pytest.raises(ValueError, match=f"{name} is {dtype} and the input torch.float32"):
                module(one, hx)
        if dtype.is_floating_point:
            with torch.autocast("cpu", torch.bfloat16):
                assert module(one.to(dtype), (h.to(dtype),) * 2)[0].dtype == torch.bfloat16


def test_a_state_can_be_handed_back() -> None:
    for module, x in (
        (MultiplicativeLSTM(E, H), torch.ones(2, 3, E)),
        (MultiplicativeLSTMCell(E, H), torch.ones(3, E)),
    ):
        module, x = module.bfloat16(), x.bfloat16()
        h, c = module(x)[1] if isinstance(module, MultiplicativeLSTM) else module(x)
        assert c.dtype == torch.float32
        module(x, (h, c))
        module(x, (h, c.bfloat16()))  # as torch.nn.LSTM holds it
        with pytest.raises(ValueError, match=r"h_0 is torch\.float32 and the input torch\.bfloat16"):
            module(x, (h.float(), c))


def test_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()
    layer = make(num_layers=2, weight_norm=True)
    x = torch.randn(4, 3, E, dtype=torch.float64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


def test_repr() -> None:
    assert repr(make(num_layers=2, bidirectional=True)).startswith(
        "MultiplicativeLSTM(\n  5, 6, num_layers=2, bidirectional=True\n"
    )
    for kind in (MultiplicativeLSTM, MultiplicativeLSTMCell):
        assert "  5, 6, bias=False, weight_norm=True, unit='initial'\n" in repr(
            kind(E, H, bias=False, weight_norm=True, unit="initial")
        )


def test_attributes_of_torch() -> None:
    layer = make(num_layers=2, bidirectional=True, bias=False)
    assert layer.proj_size == 0
    assert [len(weights) for weights in layer.all_weights] == [4] * 4
    assert [id(w) for weights in layer.all_weights for w in weights] == [id(p) for p in layer.parameters()]
    with pytest.warns(UserWarning, match=r"dropout is 0\.5"):
        make(dropout=0.5)


def test_a_backend_is_named_when_the_layer_is_made_and_shown() -> None:
    with pytest.raises(BackendError, match="no backend 'tritn'"):
        MultiplicativeLSTM(E, H, backend="tritn")
    assert "5, 6, backend='fused'" in repr(MultiplicativeLSTM(E, H, backend="fused"))
