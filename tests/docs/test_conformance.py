"""docs/conformance.json: made by the oracle, met by every backend, and missed by cells that are wrong."""

from __future__ import annotations

import contextlib
import io
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import conformance
from mulstm.nn import Layer, MultiplicativeLSTM
from mulstm.nn.layer import project
from mulstm.ops import State

CASES: list[dict[str, Any]] = json.loads(conformance.FILE.read_text())
IDS = [case["name"] for case in CASES]
PAGE = conformance.FILE.with_suffix(".md")
NEAR = {"rtol": 1e-12, "atol": 1e-12}


def test_the_file_is_what_the_oracle_makes() -> None:
    """Up to the last bits, which are the machine's."""
    fresh = json.loads(conformance.text())
    assert [case["name"] for case in fresh] == IDS
    for stored, made in zip(CASES, fresh, strict=True):
        assert stored.keys() == made.keys()
        for key in made.keys() - {"name", "cell", "unit", "weights", "gradients"}:
            if made[key] is None:
                assert stored[key] is None
            else:
                np.testing.assert_allclose(stored[key], made[key], **NEAR)
        for group in ("weights", "gradients"):
            assert stored[group].keys() == made[group].keys()
            for key, value in made[group].items():
                np.testing.assert_allclose(stored[group][key], value, **NEAR)


def tensor(value: Any, grad: bool = False) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=grad)


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_our_layers_conform(case: dict[str, Any], backend: str) -> None:
    W = case["weights"]
    layer = Layer(
        case["cell"], conformance.E, conformance.H, unit=case["unit"], weight_norm="g_zx" in W
    ).double()
    layer.load_state_dict({key: tensor(v) for key, v in W.items()})
    x, h_0 = tensor(case["x"], True), tensor(case["h_0"], True)
    c_0 = torch.zeros(conformance.B, 0).double() if case["c_0"] is None else tensor(case["c_0"], True)
    weights = layer.weights(torch.float64)
    mask = None if case["mask"] is None else tensor(case["mask"])
    mx, zx, px = project(weights, x, None, None)
    h, state = layer(weights, mx, zx, px, State(h_0, c_0), mask, backend, None, None)
    torch.testing.assert_close(h, tensor(case["h"]), **NEAR)
    loss = (h * tensor(case["dh"])).sum()
    if case["c"] is not None:
        torch.testing.assert_close(state.c, tensor(case["c"][-1]), **NEAR)
        loss = loss + (state.c * tensor(case["dc_T"])).sum()
    loss.backward()
    leaves = {"x": x, "h_0": h_0, "c_0": c_0, **dict(layer.named_parameters())}
    for key, slope in case["gradients"].items():
        torch.testing.assert_close(leaves[key].grad, tensor(slope), **NEAR)


@pytest.mark.parametrize("case", [case for case in CASES if case["cell"] == "mlstm" and not case["mask"]])
def test_the_layer_in_the_manner_of_torch_conforms(case: dict[str, Any]) -> None:
    layer = MultiplicativeLSTM(
        conformance.E, conformance.H, unit=case["unit"], weight_norm="g_zx" in case["weights"]
    ).double()
    layer.load_state_dict({f"layers.0.{key}": tensor(v) for key, v in case["weights"].items()})
    h, (h_T, c_T) = layer(tensor(case["x"]), (tensor([case["h_0"]]), tensor([case["c_0"]])))
    torch.testing.assert_close(h, tensor(case["h"]), **NEAR)
    torch.testing.assert_close(h_T[0], tensor(case["h"][-1]), **NEAR)
    torch.testing.assert_close(c_T[0], tensor(case["c"][-1]), **NEAR)


def block() -> str:
    found = re.search(r"^```py\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def printed(code: str) -> list[float]:
    """The page's script, run beside the file: how far each case is missed."""
    with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.chdir(PAGE.parent):
        exec(compile(code, PAGE.name, "exec"), {"__name__": "page"})
    return [float(line.split()[0]) for line in told.getvalue().splitlines()]


def test_the_pages_cell_conforms() -> None:
    missed = printed(block())
    assert len(missed) == sum(case["cell"] == "mlstm" and case["unit"] == "standard" for case in CASES)
    assert max(missed) < 1e-14


# What the page says it finds.
WRONG = {
    "m added": ("W_zm @ m", "W_zm @ (h + m)"),
    "tanh of a sum": ("(W_mx @ x) * (W_mh @ h)", "np.tanh(W_mx @ x + W_mh @ h)"),
    "tanh of the product": ("(W_mx @ x) * (W_mh @ h)", "np.tanh((W_mx @ x) * (W_mh @ h))"),
    "order i, f, ĥ, o": ("ĥ, i, o, f =", "i, f, ĥ, o ="),
    "no tanh": ("np.tanh(ĥ)", "ĥ"),
    "gates from h": ("W_zm @ m", "np.concatenate([W_zm[:4] @ m, W_zm[4:] @ h])"),
    "c masked": ("h = mask * h", "h, c = mask * h, mask * c"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_wrong_cell_is_found_out(change: tuple[str, str]) -> None:
    right, wrong = change
    assert right in block()
    assert max(printed(block().replace(right, wrong))) > 0.5
