"""The input product made once for each pair of lane and symbol: the same function, in fewer rows."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mulstm import update as updates
from mulstm.data.pairs import Pairs, pairs_of
from mulstm.nn.model import LanguageModel
from mulstm.recipe import (
    DropoutRecipe,
    InitRecipe,
    ModelRecipe,
    OptimiserRecipe,
    Recipe,
    TrainRecipe,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
N = 30


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def on_device(x: np.ndarray, more: int) -> Pairs[Tensor]:
    found = pairs_of(x)
    n = x.size
    parts = [
        part if rest is None else np.append(part, np.full(more, rest, np.int32))
        for part, rest in zip(found, (0, 0, None, None, n), strict=True)
    ]
    return Pairs(*(torch.from_numpy(part).cuda() for part in parts))


@pytest.mark.parametrize(
    "model",
    [
        ModelRecipe(hidden=700, embedding=40, weight_norm=True),
        ModelRecipe(hidden=600),
        ModelRecipe(hidden=600, unit="initial"),
        ModelRecipe(cell="lstm", hidden=600, layers=2, skip=True),
        ModelRecipe(cell="milstm", hidden=600, embedding=20),
    ],
    ids=str,
)
def test_with_pairs_and_without(model: ModelRecipe) -> None:
    B, T = 7, 60
    torch.manual_seed(1)
    ours = LanguageModel(model, N, init=InitRecipe()).cuda().train()
    ours.precision = "bf16"
    rng = np.random.default_rng(1)
    x = rng.integers(N, size=(B, T)).astype(np.uint8)
    y = torch.from_numpy(rng.integers(N, size=(B, T))).cuda()
    given = torch.from_numpy(x).long().cuda()
    dropout = DropoutRecipe(embedding=0.3 if model.embedding else 0.0, hidden=0.2)
    masks = ours.draw_masks(B, dropout, torch.Generator("cuda").manual_seed(2))
    exact = LanguageModel(model, N, init=None).cuda().double()
    exact.load_state_dict(ours.state_dict())
    exact.precision, exact.backend = "fp64", "reference"

    def gradients(m: LanguageModel, pairs: Pairs[Tensor] | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss, _ = m.loss(given, y, None, masks, None, pairs)
        return loss.detach(), list(torch.autograd.grad(loss, list(m.parameters())))

    plain, paired, true = gradients(ours, None), gradients(ours, on_device(x, 9)), gradients(exact, None)
    assert float(paired[0]) == pytest.approx(float(plain[0]), rel=1e-4)
    for (name, _), a, b, c in zip(ours.named_parameters(), plain[1], paired[1], true[1], strict=True):
        assert apart(b, c) < max(0.01, 1.5 * apart(a, c)), name


def test_training_takes_a_graph_for_each_round_number_of_pairs() -> None:
    """Chunks with few and with many different symbols in turn, beside the same without pairs."""
    recipe = Recipe(
        model=ModelRecipe(hidden=600, embedding=32, weight_norm=True),
        dropout=DropoutRecipe(embedding=0.2, hidden=0.2),
        optimiser=OptimiserRecipe(rate=1e-3, clip=1.0),
        train=TrainRecipe(lanes=16, chunk=64, precision="bf16"),
    )
    rng = np.random.default_rng(0)
    texts = [rng.integers(many, size=(16, 65)).astype(np.uint8) for many in (5, 12, 30, 5, 200)]

    def losses(pairs: bool) -> tuple[list[float], set[int]]:
        model = LanguageModel(recipe.model, 205, init=None)
        model.initialise(InitRecipe(), torch.Generator().manual_seed(1))
        model = model.cuda().train()
        model.precision = "bf16"
        update = updates.make(model, recipe, torch.Generator("cuda").manual_seed(1))
        assert isinstance(update, updates.GraphedUpdate)
        assert update.places == 16 * 64
        if not pairs:
            update.places = 0
        found = []
        for n in range(25):
            text = texts[n % len(texts)]
            found.append(float(update(text[:, :-1], text[:, 1:], 1e-3)))
        return found, set(update.graphs)

    with_pairs, graphs = losses(True)
    without, one = losses(False)
    assert one == {0}
    assert len(graphs) == 4  # 5, 12 and 30 symbols, and too many to gain by
    assert 0 in graphs
    assert with_pairs == pytest.approx(without, rel=5e-3)
    assert with_pairs == losses(True)[0]  # bit for bit
