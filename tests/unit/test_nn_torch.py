"""What PyTorch's users do to any module: parametrize, prune, replicate, transform, trace, cast."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, stack_module_state
from torch.nn.utils import parametrizations, parametrize, prune

from mulstm.errors import BackendError
from mulstm.nn import LanguageModel, MultiplicativeLSTM, MultiplicativeLSTMCell
from mulstm.recipe import ModelRecipe
from nn_models import make

E, H = 5, 6
X = torch.randn(4, 3, E, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def layer(**options: object) -> MultiplicativeLSTM:
    torch.manual_seed(4)
    return MultiplicativeLSTM(E, H, dtype=torch.float64, **options)


class Half(nn.Module):
    def forward(self, W: Tensor) -> Tensor:
        return W / 2


def acts_as(module: MultiplicativeLSTM, right: MultiplicativeLSTM) -> None:
    torch.testing.assert_close(module(X), right(X))


@pytest.mark.parametrize("name", ["W_zm", "g_zx", "b_z"])
@pytest.mark.parametrize("evaluation", [True, False])
def test_parametrized(name: str, evaluation: bool) -> None:
    module = layer(weight_norm=True).train(not evaluation)
    right = copy.deepcopy(module)
    its = right.stack[0].get_parameter(name)
    with torch.set_grad_enabled(not evaluation):
        acts_as(module, right)
        parametrize.register_parametrization(module.layers[0], name, Half())
        with torch.no_grad():
            its.div_(2)
        acts_as(module, right)
        with torch.no_grad():
            module.layers[0].parametrizations[name].original.add_(1)
            its.add_(0.5)
        acts_as(module, right)


@pytest.mark.parametrize("evaluation", [True, False])
def test_pruned(evaluation: bool) -> None:
    module = layer().train(not evaluation)
    right = copy.deepcopy(module)
    mine, its = module.layers[0], right.stack[0].get_parameter("W_zm")
    with torch.set_grad_enabled(not evaluation):
        for share in (0.3, 0.5):
            prune.l1_unstructured(mine, "W_zm", share)
            with torch.no_grad():
                its.mul_(mine.W_zm_mask)
            acts_as(module, right)
            with torch.no_grad():
                mine.W_zm_orig.mul_(2)
                its.mul_(2)
            acts_as(module, right)
        prune.remove(mine, "W_zm")
        acts_as(module, right)


def halved(module: nn.Module, name: str) -> None:
    parametrize.register_parametrization(module, name, Half())


WAYS = {
    "halved": halved,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "cayley": partial(parametrizations.orthogonal, orthogonal_map="cayley", use_trivialization=False),
    "twice": lambda module, name: (parametrizations.weight_norm(module, name), halved(module, name)),
    "pruned": partial(prune.l1_unstructured, amount=0.3),
    "weight_norm of old": partial(nn.utils.weight_norm, dim=1),
    "spectral_norm of old": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", [MultiplicativeLSTM, MultiplicativeLSTMCell])
@pytest.mark.parametrize("name", ["W_mh", "W_zm"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_weight_is_made_of_is_drawn_anew(way: str, name: str, kind: Any) -> None:
    """As torch.nn.LSTM does it: a reset is one of the parameters, whatever they make."""
    torch.manual_seed(1)
    module, plain = kind(E, H, dtype=torch.float64), kind(E, H, dtype=torch.float64)
    WAYS[way](module.layers[0], name)
    before = {key: value.clone() for key, value in module.named_parameters()}
    for each in (module, plain):
        torch.manual_seed(7)
        each.reset_parameters()
    W = plain.stack[0].get_parameter(name)
    made = module.stack[0].named()[name]
    if way.startswith("weight_norm"):  # which can be gone back from
        torch.testing.assert_close(made, W)
    elif way == "twice":
        torch.testing.assert_close(made, W / 2)
    else:
        (original,) = (v for key, v in module.named_parameters() if key.endswith(("original", "_orig")))
        assert torch.equal(original, W)
    for key, value in module.named_parameters():
        if not key.endswith(("b_z", "_g", "original0")):  # lengths of an orthogonal matrix do not change
            assert not torch.equal(value, before[key])


def test_a_bias_that_is_made_of_another_is_reset() -> None:
    module = layer()
    halved(module.layers[0], "b_z")
    with torch.no_grad():
        module.layers[0].parametrizations["b_z"].original.fill_(9)
    module.reset_parameters()
    assert module.layers[0].b_z.tolist() == [0.0] * (3 * H) + [1.5] * H


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("evaluation", [True, False])
def test_weight_norm_of_old(evaluation: bool) -> None:
    module = layer().train(not evaluation)
    right = copy.deepcopy(module)
    nn.utils.weight_norm(module.layers[0], "W_mh")
    with torch.no_grad():
        module.layers[0].W_mh_g.mul_(2)
        right.stack[0].get_parameter("W_mh").mul_(2)
    with torch.set_grad_enabled(not evaluation):
        acts_as(module, right)


def replica(module: nn.Module) -> nn.Module:
    """As DataParallel makes it, which wants several GPUs for it."""
    found = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        setattr(found, name, replica(child))
    for name, p in [*module._parameters.items(), *module._buffers.items()]:
        setattr(found, name, None if p is None else p.clone())
    return found


@pytest.mark.parametrize("evaluation", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_replicas(evaluation: bool, bias: bool) -> None:
    module = layer(bias=bias).train(not evaluation)
    with torch.set_grad_enabled(not evaluation):
        for _ in range(2):
            acts_as(replica(module), module)
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(1.1)


@pytest.mark.parametrize("cell", ["mlstm", "lstm", "milstm", "mrnn", "rnn", "tensor-rnn"])
def test_without_data_it_tells_shapes(cell: str) -> None:
    with torch.device("meta"):
        logits, _ = LanguageModel(ModelRecipe(cell=cell, hidden=H), 9)(torch.randint(9, (2, 5)))
        module = MultiplicativeLSTM(E, H)
        h, (h_n, c_n) = module(torch.randn(4, 3, E))
        h.sum().backward()
    assert (logits.shape, logits.device.type) == ((2, 5, 9), "meta")
    assert (h.shape, h_n.shape, c_n.shape) == ((4, 3, H), (1, 3, H), (1, 3, H))
    assert all(p.grad is not None for p in module.parameters())


def test_gradients_of_torch_func() -> None:
    model, x = make(ModelRecipe(hidden=6, embedding=4, weight_norm=True)), torch.randint(9, (2, 5))

    def loss(p: dict[str, Tensor]) -> Tensor:
        logits: Tensor = functional_call(model, p, (x,))[0]
        return logits.square().sum()

    p = dict(model.named_parameters())
    found = torch.func.grad(loss)(p)
    right = torch.autograd.grad(loss(p), list(p.values()))
    torch.testing.assert_close(list(found.values()), list(right))


def test_an_ensemble_by_vmap() -> None:
    modules = [layer().eval() for _ in range(3)]
    with torch.no_grad():
        for k, module in enumerate(modules):
            module(X)
            module.stack[0].b_z.add_(k)
        p, b = stack_module_state(modules)
        found = torch.vmap(lambda p, b: functional_call(modules[0], (p, b), (X,))[0])(p, b)
        torch.testing.assert_close(found, torch.stack([module(X)[0] for module in modules]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize("frozen", [True, False])
def test_forward_mode(frozen: bool) -> None:
    module, dx = layer().eval().requires_grad_(not frozen), torch.ones_like(X)
    with torch.set_grad_enabled(not frozen), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(module(forward_ad.make_dual(X, dx))[0]).tangent
    step = 1e-6
    right = (module(X + step * dx)[0] - module(X - step * dx)[0]) / (2 * step)
    torch.testing.assert_close(tangent, right, atol=1e-8, rtol=1e-6)


def test_a_backend_asked_by_name_objects_to_transforms() -> None:
    module = layer(backend="fused")
    with pytest.raises(BackendError, match=r"cannot run here: the transforms of torch\.func"):
        torch.func.grad(lambda x: module(x)[0].sum())(X)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("kind", ["layer", "cell", "model"])
def test_traced(kind: str, gradients: bool) -> None:
    x = X if kind == "layer" else X[0] if kind == "cell" else torch.randint(9, (2, 5))
    modules = {
        "layer": layer(),
        "cell": MultiplicativeLSTMCell(E, H, dtype=torch.float64),
        "model": make(ModelRecipe(hidden=6, embedding=4)),
    }
    module = modules[kind].eval()
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(module, (x,))
        torch.testing.assert_close(traced(x)[0], module(x)[0])


@pytest.mark.filterwarnings("ignore")  # of the exporter's own
def test_a_layer_to_onnx(tmp_path: Path) -> None:
    """ONNX knows none of our operations, and reads those of the reference."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    module, x = MultiplicativeLSTM(E, H).eval(), X.float()
    torch.onnx.export(module, (x,), tmp_path / "layer.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path / "layer.onnx")
    (h, *_) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(h), module(x)[0])


@pytest.mark.parametrize("name", ["embedding", "W_out"])
def test_a_pruned_model_is_the_same_by_every_door(name: str) -> None:
    model = make(ModelRecipe(hidden=6, embedding=4))
    prune.l1_unstructured(model, name, 0.3)
    x, h = torch.randint(9, (2, 20)), torch.randn(2, 6)
    for _ in range(2):  # a graph that is kept could be used once
        (model.hidden(x)[0].sum() + model.output([h]).sum()).backward()
    with torch.no_grad():
        getattr(model.eval(), f"{name}_orig").mul_(3)
        found = model.hidden(x)[0], model.output([h])
        model(x)
        again = model.hidden(x)[0], model.output([h])
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("evaluation", [True, False])
def test_autocast_does_not_touch_a_model(evaluation: bool) -> None:
    model = LanguageModel(ModelRecipe(hidden=6, embedding=4, weight_norm=True), 9).train(not evaluation)
    x = torch.randint(9, (2, 5))

    def everything() -> list[Tensor]:
        found = [f(*of)[0] for f, of in ((model, [x]), (model.hidden, [x]), (model.loss, [x, x]))]
        return [*found, model.output([torch.linspace(-1, 1, 6)]), model.folded().stack[0].W_zx]

    with torch.set_grad_enabled(not evaluation):
        right = everything()
        with torch.autocast("cpu", torch.bfloat16):
            found = everything()
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_the_type_that_is_usual_elsewhere_is_not_taken(usual: AbstractContextManager[None]) -> None:
    torch.manual_seed(4)
    module, x = MultiplicativeLSTM(16, 64), torch.randn(20, 8, 16, requires_grad=True)
    state = torch.randn(1, 8, 64, requires_grad=True), torch.randn(1, 8, 64)

    def run() -> list[Tensor]:
        h, _ = module(x, state)
        with torch.no_grad():
            plain, _ = module.eval()(x)
        return [h, plain, *torch.autograd.grad(h.square().sum(), [x, state[0], *module.parameters()])]

    truth = run()
    with usual:
        found = run()
    torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-6)


def test_fake_tensors_pass_through() -> None:
    module = layer().float()
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = MultiplicativeLSTM(E, H)
        for one in (made, module, module.eval()):
            for gradients in (True, False):
                with torch.set_grad_enabled(gradients):
                    assert one(torch.randn(4, 3, E))[0].shape == (4, 3, H)


def test_weights_that_come_later() -> None:
    for bias in (True, False):
        right = layer(bias=bias).float()
        with torch.device("meta"):
            empty, assigned = (MultiplicativeLSTM(E, H, bias=bias) for _ in range(2))
            assert MultiplicativeLSTM(E, H, bias=bias, device="cpu").layers[0].W_zx.device.type == "cpu"
        empty.to_empty(device="cpu").load_state_dict(right.state_dict())
        assigned.load_state_dict(right.state_dict(), assign=True)
        for module in (empty, assigned):
            torch.testing.assert_close(module(X.float()), right(X.float()))


def test_exported_for_any_number_of_lanes() -> None:
    module = layer().float().eval()
    lanes = torch.export.Dim("lanes")
    program = torch.export.export(module, (torch.randn(9, 8, E),), dynamic_shapes=({1: lanes},))
    x = torch.randn(9, 300, E)
    torch.testing.assert_close(program.module()(x)[0], module(x)[0])


@pytest.mark.parametrize("cell", ["mlstm", "milstm", "rnn"])
def test_an_exported_model_takes_any_number_of_lanes_and_can_be_saved(cell: str, tmp_path: Path) -> None:
    model = LanguageModel(ModelRecipe(cell=cell, hidden=8, embedding=4), 20).eval()
    lanes = torch.export.Dim("lanes")
    program = torch.export.export(model, (torch.randint(20, (3, 7)),), dynamic_shapes=({0: lanes},))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for B in (1, 2, 30):
        x = torch.randint(20, (B, 7))
        torch.testing.assert_close(loaded(x), model(x))


def test_many_gradients_at_once() -> None:
    module, x = MultiplicativeLSTM(16, 512), torch.randn(20, 32, 16, requires_grad=True)  # 1 MiB and more
    h, _ = module(x)
    given, W = torch.randn(3, *h.shape), module.stack[0].get_parameter("W_zx")
    each = [torch.stack([torch.autograd.grad(h, p, g, retain_graph=True)[0] for g in given]) for p in (x, W)]
    found = torch.autograd.grad(h, (x, W), given, is_grads_batched=True)
    for a, b in zip(found, each, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_float64_stays_float64_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert layer()(X)[0].dtype == torch.float64


@pytest.mark.parametrize("kind", [torch.int64, torch.complex64])
def test_autocast_casts_plain_numbers_only(kind: torch.dtype) -> None:
    module = MultiplicativeLSTM(3, 4)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=f"The input is {kind}"):
        module(torch.ones(5, 2, 3, dtype=kind))


@pytest.mark.parametrize(
    "given",
    [
        {"bias": 0.5},
        {"batch_first": 1},
        {"bidirectional": "yes"},
        {"hidden_size": 6.0},
        {"hidden_size": True},
        {"num_layers": 1.0},
        {"num_layers": 2, "dropout": "a"},
        {"num_layers": 2, "dropout": True},
    ],
)
def test_arguments_of_a_wrong_type_are_named(given: dict[str, Any]) -> None:
    (name,) = given.keys() - {"num_layers"} or {"num_layers"}
    with pytest.raises(TypeError, match=rf"^{name} is {given[name]!r}\. Give "):
        MultiplicativeLSTM(5, **({"hidden_size": 6} | given))


def test_a_step_may_be_cleared_in_place() -> None:
    """As after an episode's end: h[done] = 0."""
    cell = MultiplicativeLSTMCell(3, 4)
    x = torch.randn(2, 2, 3)
    grads = []
    for in_place in (True, False):
        h, c = cell(x[0])
        if in_place:
            h[0], c[0] = 0.0, 0.0
        else:
            on = torch.tensor([[0.0], [1.0]])
            h, c = h * on, c * on
        h, c = cell(x[1], (h, c))
        grads.append(torch.autograd.grad((h * c).sum(), list(cell.parameters())))
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
