"""Dynamic evaluation on a GPU: one graph a segment, and the numbers of the CPU."""

import pytest
import torch

from made import repeating_text
from mulstm.data import corpus
from mulstm.dynamic import Settings, evaluate_dynamic, gather_statistics
from mulstm.evaluate import evaluate
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SETTINGS = Settings(segment=7, rate=2e-2, pull=1e-3, epsilon=1e-2)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(repeating_text())
    return corpus.load(str(path), split="50-25-25", alphabet="corpus")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("folded", [True, False])
def test_the_gpu_learns_what_the_cpu_learns(text, folded, precision) -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelRecipe(hidden=130, embedding=8, weight_norm=True), text.alphabet.size)
    model = model.folded(embedding=False) if folded else model
    R = gather_statistics(model, text.split("train"), lanes=4, segment=7, batches=5)
    split = text.split("test")
    slow = evaluate_dynamic(model, split, R, SETTINGS)
    static = evaluate(model, split, lanes=1)
    model = model.cuda()
    model.precision = precision
    fast = evaluate_dynamic(model, split, R, SETTINGS)
    assert fast.symbols == slow.symbols
    gained = static.bits_per_char - slow.bits_per_char
    assert gained > 0.1
    assert abs(fast.bits_per_char - slow.bits_per_char) < (0.002 if precision == "fp32" else 0.1) * gained
    on_gpu = gather_statistics(model, text.split("train"), lanes=4, segment=7, batches=5)
    for name, r in R.items():
        apart = (on_gpu[name].cpu() - r).norm() / r.norm()
        assert apart < (1e-3 if precision == "fp32" else 0.03), name
