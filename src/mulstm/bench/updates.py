"""Who is timed at the level of the full training update: all our cells, the plain loop, cuDNN's LSTM."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mulstm import update
from mulstm.bench import floor
from mulstm.bench.floor import Work
from mulstm.bench.layers import E
from mulstm.bench.timing import Contender, Ready, Session, rms
from mulstm.nn.masks import Masks
from mulstm.nn.model import LanguageModel
from mulstm.ops import blocks
from mulstm.recipe import DropoutRecipe, InitRecipe, ModelRecipe, OptimiserRecipe, Recipe, TrainRecipe, load

N = 205  # the alphabet of enwik8
RATE = 1e-4
GRAPH = "triton, one graph"
# Of a recurrent matrix's elements, times the root of H. With 0.87 a rounding error grows from step to step:
# after 100 of them an LSTM of 1900 units was 0.10 from float64, whoever computed it.
DEVIATION = 0.25


def recipe(model: ModelRecipe, B: int, T: int, backend: str = "auto") -> Recipe:
    """The whole update that is timed: weight norm and embedding as the model has them, both dropouts,
    softmax, clipping, Adam."""
    deviation = DEVIATION / model.hidden**0.5
    # Orthogonal matrices would take seconds to draw.
    init = InitRecipe(
        recurrent="gaussian", recurrent_scale=deviation, lower="gaussian", lower_scale=deviation,
        input="gaussian", input_scale=0.05, output="gaussian", output_scale=0.02,
    )  # fmt: skip
    return Recipe(
        model=model,
        init=init,
        dropout=DropoutRecipe(embedding=0.5 if model.embedding else 0.0, hidden=0.2),
        optimiser=OptimiserRecipe(rate=RATE, clip=1.0),
        train=TrainRecipe(lanes=B, chunk=T, precision="bf16", backend=backend),
    )


def model_of(how: Recipe, device: str) -> LanguageModel:
    """A model to be trained, its parameters drawn on the device."""
    model = LanguageModel(how.model, N, init=None).to(device)
    model.initialise(how.init, torch.Generator(device).manual_seed(how.train.seed))
    model.precision, model.backend = how.train.precision, how.train.backend
    return model


def exact(model: LanguageModel) -> LanguageModel:
    """The same model in float64, by plain calls."""
    twin = LanguageModel(model.recipe, model.alphabet_size, init=None).to(model.device).double()
    twin.load_state_dict(model.state_dict())
    twin.precision, twin.backend = "fp64", "reference"
    return twin.train(model.training)


def frequencies() -> npt.NDArray[np.float64]:
    """Of the symbols: like a text's, so that 100 of them are about 29 different ones, as in enwik8."""
    p = (np.arange(N) + 3.0) ** -1.83
    return np.asarray(p / p.sum(), dtype=np.float64)


class OurUpdate:
    """Our update over three sets of random symbols in turn."""

    def __init__(self, how: Recipe, device: str) -> None:
        self.how, self.model = how, model_of(how, device)
        generator = torch.Generator(device).manual_seed(1)
        # A backend asked for by name is the naive one here: nobody captures for it.
        kind = update.make if how.train.backend == "auto" else update.Update
        self.update = kind(self.model, how, generator)
        rng = np.random.default_rng(0)
        shape = (2, how.train.lanes, how.train.chunk)
        self.sets = [rng.choice(N, size=shape, p=frequencies()).astype(np.uint8) for _ in range(3)]
        self.turn = 0

    def __call__(self) -> None:
        self.turn += 1
        x, y = self.sets[self.turn % 3]
        self.update(x, y, RATE)

    def error(self) -> float:
        """Of the whole gradient of one chunk from a zero state, at the present weights and with masks."""
        device = self.model.device
        x, y = (torch.from_numpy(part).long().to(device) for part in self.sets[0])
        masks = self.model.draw_masks(x.shape[0], self.how.dropout, torch.Generator(device).manual_seed(2))
        return rms(_gradient(self.model, x, y, masks), _gradient(exact(self.model), x, y, masks))


def _gradient(model: LanguageModel, x: Tensor, y: Tensor, masks: Masks | None) -> Tensor:
    """All of it in one vector; the parameters' own gradients, which a graph may hold, are not touched."""
    loss, _ = model.loss(x, y, None, masks)
    return _joined(loss, [p for p in model.parameters() if p.requires_grad])


def _joined(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    # A gradient that does not come counts as zero, which the comparison then shows.
    found = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return torch.cat([g.double().reshape(-1) for g in found])


class LSTMModel(nn.Module):
    """A language model round torch.nn.LSTM, as one would write it: no weight norm."""

    def __init__(self, H: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(N, E) * 0.4 - 0.2)
        self.lstm = nn.LSTM(E, H)
        nn.init.normal_(self.lstm.get_parameter("weight_hh_l0"), std=DEVIATION / H**0.5)
        self.out = nn.Linear(H, N)

    def forward(
        self, x: Tensor, y: Tensor, state: tuple[Tensor, Tensor] | None, masks: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The mean nats of y (T, B) after x, and the state."""
        e = nn.functional.embedding(x, self.table)
        h, after = self.lstm(e * masks[0].to(e.dtype), state)
        logits = self.out(h * masks[1].to(h.dtype))
        wide = torch.promote_types(logits.dtype, torch.float32)
        return nn.functional.cross_entropy(logits.to(wide).flatten(0, 1), y.flatten()), after


class LSTMUpdate:
    """The same update round cuDNN's LSTM: embedding, masks, softmax, clipping, Adam."""

    def __init__(self, H: int, B: int, T: int, device: str) -> None:
        self.B, self.device = B, torch.device(device)
        with torch.device(device):
            self.model = LSTMModel(H)
        self.p = list(self.model.parameters())
        rate = torch.tensor(RATE, device=device)
        self.adam = torch.optim.Adam(self.p, lr=rate, fused=True, capturable=self.device.type == "cuda")
        drawn = np.random.default_rng(0).choice(N, size=(2, T, B), p=frequencies())
        self.x, self.y = torch.from_numpy(drawn).to(device)
        self.state = (torch.zeros(1, B, H, device=device), torch.zeros(1, B, H, device=device))

    def _masks(self) -> tuple[Tensor, Tensor]:
        def draw(width: int, share: float) -> Tensor:
            dice = torch.rand(self.B, width, device=self.device)
            return (dice >= share).float() / (1 - share)

        return draw(E, 0.5), draw(self.state[0].shape[2], 0.2)

    def _loss(
        self, state: tuple[Tensor, Tensor] | None, masks: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            found: tuple[Tensor, tuple[Tensor, Tensor]] = self.model(self.x, self.y, state, masks)
        return found

    def __call__(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        loss, after = self._loss(self.state, self._masks())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.p, 1.0)
        self.adam.step()
        for kept, new in zip(self.state, after, strict=True):
            kept.copy_(new.detach())

    def error(self) -> float:
        """Of the whole gradient, as for ours."""
        masks = self._masks()
        ours = _joined(self._loss(None, masks)[0], self.p)
        twin = copy.deepcopy(self.model).double()
        loss, _ = twin(self.x, self.y, None, masks)
        return rms(ours, _joined(loss, list(twin.parameters())))


def work_of(model: ModelRecipe, B: int, T: int, parameters: int = 0, backward: bool = True) -> Work:
    """The products of a language model: a one-hot input is looked up, not multiplied."""
    H, rows = model.hidden, blocks(model.unit) + (1 if model.cell == "mlstm" else 0)
    loops = tuple(floor.recurrence(model.cell, H, blocks(model.unit)) for _ in range(model.layers))
    inputs = model.layers if model.skip else 1
    other = rows * H * (model.embedding * inputs + H * (model.layers - 1))
    other += N * H * (model.layers if model.skip else 1)
    return Work(B, T, loops, other, parameters, backward)


def _ours(
    session: Session, name: str, model: ModelRecipe, B: int, T: int, backend: str = "auto"
) -> Contender:
    def prepare() -> Ready:
        work = OurUpdate(recipe(model, B, T, backend), session.device)
        if backend == "auto":
            for _ in range(5):  # the first calls run as they stand, then comes the capture
                work()
        return Ready(work, work.model.parameter_count(), work.error)

    def work_done(ready: Ready) -> Work:
        return work_of(model, B, T, ready.parameters)

    how = GRAPH if backend == "auto" else backend
    return Contender(name, how, "update", model.hidden, B, T, work_done, prepare, slow=backend != "auto")


def _lstm(session: Session, H: int, B: int, T: int, graph: bool) -> Contender:
    def prepare() -> Ready:
        work = LSTMUpdate(H, B, T, session.device)
        return Ready(session.captured(work) if graph else work, sum(p.numel() for p in work.p), work.error)

    def work_done(ready: Ready) -> Work:
        return work_of(ModelRecipe(cell="lstm", hidden=H, embedding=E), B, T, ready.parameters)

    backend = "cudnn, one graph" if graph else "cudnn"
    return Contender("nn.LSTM equal parameters", backend, "update", H, B, T, work_done, prepare)


def updates(session: Session, H: int, B: int, T: int, equal: int = 0, naive: bool = False) -> list[Contender]:
    """Everybody at the level of the full training update; `equal` is the LSTM's H of as many parameters."""
    model = ModelRecipe(hidden=H, embedding=E, weight_norm=True)
    found = [_ours(session, "mlstm", model, B, T)]
    if equal:
        found += [_lstm(session, equal, B, T, graph) for graph in (False, True)]
    if naive:
        found.append(_ours(session, "naive", model, B, T, backend="reference"))
    return found


def cells(session: Session, B: int, T: int, hidden: int = 0) -> list[Contender]:
    """The other cells that the paper trains, at its sizes (or `hidden`): all through the same update."""
    models: dict[str, ModelRecipe] = {
        "lstm": ModelRecipe(cell="lstm", hidden=1900, embedding=E, weight_norm=True),
        "lstm, 2 layers": load("hutter/lstm-stacked-rmsprop").model,
        "milstm": load("hutter/milstm").model,
        "mlstm, initial unit": load("hutter/mlstm-rmsprop").model,
    }
    return [
        _ours(session, name, replace(model, hidden=hidden or model.hidden), B, T)
        for name, model in models.items()
    ]
