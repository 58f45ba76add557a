"""One training update over buffers that never move: plain calls on a CPU, one CUDA graph on a GPU."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mulstm import optim
from mulstm.data.pairs import Pairs, pairs_of, room_for
from mulstm.nn import packed
from mulstm.nn.masks import Masks
from mulstm.nn.model import LanguageModel
from mulstm.ops.reference import State
from mulstm.parallel import Share
from mulstm.recipe import Recipe

Symbols = npt.NDArray[np.integer]
Begins = npt.NDArray[np.bool_]
# Marks of a place: a record begins here; nothing is to be predicted here.
BEGINS, NOTHING = 1, 2


class Update:
    """Model, optimiser and buffers. A call makes one update and reads nothing back from the device."""

    def __init__(
        self, model: LanguageModel, recipe: Recipe, generator: torch.Generator, share: Share | None = None
    ) -> None:
        self.model = model
        self.recipe = recipe
        self.generator = generator
        self.share = share or Share(device=model.device)
        self.named = [(name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad]
        self.parameters = [tensor for _, tensor in self.named]
        device = self.parameters[0].device
        train = recipe.train
        self.own = self.share.lanes(train.lanes)
        B = self.own.stop - self.own.start
        # x, y and, where records begin inside chunks, marks.
        planes = 3 if recipe.data.records else 2
        self.xy = torch.zeros(planes, B, train.chunk, dtype=torch.uint8, device=device)
        self.state: tuple[State, ...] = model.zero_state(B)
        # Host numbers that change from update to update live in tensors, which a captured graph reads anew.
        self.rate = torch.zeros((), dtype=torch.float32, device=device)
        self.blend = torch.ones_like(self.rate)  # what the new weights count in the average
        self.dropout = SimpleNamespace(
            **{
                name: torch.full_like(self.rate, chance) if chance else 0.0
                for name, chance in vars(recipe.dropout).items()
            }
        )
        self.loss = torch.zeros_like(self.rate)
        # nats, the symbols they are of, gradient norms
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)
        self.optimiser = optim.build(recipe.optimiser, self.named, self.rate)
        self.averaged: LanguageModel | None = copy.deepcopy(model) if train.ema else None
        self.pairs: Pairs[Tensor] | None = None  # of the chunk in the buffer, where they are of use

    def __call__(
        self, x: Symbols, y: Symbols, rate: float, blend: float = 1.0, first: Begins | None = None
    ) -> Tensor:
        """The mean nats a symbol before this update, a tensor that the next call overwrites."""
        self.load(x, y, first)
        self.rate.fill_(rate)
        if self.averaged is not None:
            self.blend.fill_(blend)
        self.step()
        return self.loss

    def load(self, x: Symbols, y: Symbols, first: Begins | None = None) -> None:
        """Puts this process's lanes of a chunk into the buffer."""
        self._fill(self.xy, x, y, first)

    def _fill(self, planes: Tensor, x: Symbols, y: Symbols, first: Begins | None) -> None:
        parts = [x, y] if first is None else [x, np.maximum(y, 0), first * BEGINS + (y < 0) * NOTHING]
        for place, part in zip(planes, parts, strict=True):
            place.copy_(torch.from_numpy(np.ascontiguousarray(part[self.own], dtype=np.uint8)))

    def clear(self) -> None:
        """Sets every lane's state to zero."""
        for kept in self.state:
            kept.h.zero_()
            kept.c.zero_()

    def step(self) -> None:
        """What a graph captures: mask drawing, forward, backward, clipping, optimiser, state, average."""
        train = self.recipe.train
        self.optimiser.zero_grad(set_to_none=True)
        masks = self._masks()
        before = self._surviving()
        (x, y), first = self.xy[:2].long(), None
        if self.xy.shape[0] == 3:
            first = (self.xy[2] & BEGINS).bool()
            y = y.masked_fill((self.xy[2] & NOTHING).bool(), -1)
        loss, after = self.model.loss(x, y, before, masks, first, self.pairs)
        # Summed over the processes, this is the mean over the symbols of all lanes.
        part = loss * self.share.part(None if first is None else y)
        part.backward()  # type: ignore[no-untyped-call]
        self.share.sum(parameter.grad for parameter in self.parameters)
        norm = optim.clip_and_step(self.optimiser, self.parameters, self.recipe.optimiser.clip)
        with torch.no_grad():
            if train.refresh:
                _, after = self.model.hidden(x, before, masks, first)
            for kept, new in zip(self.state, after, strict=True):
                kept.h.copy_(new.h)
                kept.c.copy_(new.c)
            if self.averaged is not None:
                for mean, parameter in zip(self.averaged.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(parameter, self.blend.to(mean.dtype))
            self.loss.copy_(loss)
            count = torch.full_like(loss, y.numel()) if first is None else (y >= 0).sum().to(loss.dtype)
            self.totals += torch.stack([loss * count, count, norm])

    def _masks(self) -> Masks | None:
        """Drawn for the lanes of all processes, so that each draws the same and takes its own."""
        masks = self.model.draw_masks(self.recipe.train.lanes, self.dropout, self.generator)
        if masks is None:
            return None

        def own(mask: Tensor | None) -> Tensor | None:
            return None if mask is None else mask[self.own]

        return masks._replace(
            embedding=own(masks.embedding),
            hidden=tuple(own(mask) for mask in masks.hidden),
            output=own(masks.output),
        )

    def _surviving(self) -> tuple[State, ...]:
        """The carried state, with that of some lanes dropped at random where the recipe asks for it."""
        train = self.recipe.train
        if not train.drop_state:
            return self.state
        on, dtype = self.rate.device, self.rate.dtype
        dice = torch.rand(train.lanes, 1, generator=self.generator, dtype=dtype, device=on)[self.own]
        keep = dice >= train.drop_state
        return tuple(State(s.h * keep.to(s.h.dtype), s.c * keep.to(s.c.dtype)) for s in self.state)


class GraphedUpdate(Update):
    """The same update, captured once and replayed. Its first calls run as they stand, and count.

    Where the pairs of lane and symbol are of use there is a graph for each round number of them: which one
    runs depends on the chunk alone, so that a run that was interrupted goes on bit for bit. Each runs as it
    stands once before it is captured, since a capture forbids to load a kernel.
    """

    EAGER = 3  # calls before the capture: libraries load, the optimiser makes its state
    SLOTS = 4  # chunks on their way to the device at a time

    def __init__(
        self, model: LanguageModel, recipe: Recipe, generator: torch.Generator, share: Share | None = None
    ) -> None:
        super().__init__(model, recipe, generator, share)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by rows for pairs
        self.seen: set[int] = set()  # rows for pairs whose kernels are loaded
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.calls = 0
        self.slots = [torch.zeros_like(self.xy, device="cpu").pin_memory() for _ in range(self.SLOTS)]
        self.copied = [torch.cuda.Event() for _ in range(self.SLOTS)]  # type: ignore[no-untyped-call]
        # Several processes must all run the same graph at a time, and their lanes have other pairs.
        alone = self.share.count == 1 and not recipe.data.records
        self.places = self.xy[0].numel() if alone and packed.pairs_pay(model) else 0
        # pair and order of all places, then lane, symbol and first place of each pair
        size = 5 * self.places + 1 if self.places else 0
        self.numbers = torch.zeros(size, dtype=torch.int32, device=self.xy.device)
        self.number_slots = [torch.zeros(size, dtype=torch.int32).pin_memory() for _ in range(self.SLOTS)]

    def load(self, x: Symbols, y: Symbols, first: Begins | None = None) -> None:
        """Through pinned memory, so that the host need not wait for the updates before."""
        slot = self.calls % self.SLOTS
        self.copied[slot].synchronize()
        self._fill(self.slots[slot], x, y, first)
        self.xy.copy_(self.slots[slot], non_blocking=True)
        if self.places:
            self._fill_pairs(self.number_slots[slot], x[self.own])
        self.copied[slot].record()

    def _fill_pairs(self, slot: Tensor, x: Symbols) -> None:
        """Rows past the last pair have no places."""
        found = pairs_of(np.ascontiguousarray(x, dtype=np.uint8))
        rows, n = room_for(found), self.places
        self.pairs = None
        if rows:
            host, self.pairs = self._parts(slot, rows), self._parts(self.numbers, rows)
            for to, part, rest in zip(host, found, (0, 0, 0, 0, n), strict=True):
                to.fill_(rest)
                to[: part.shape[0]] = torch.from_numpy(part)
            used = 2 * n + 3 * rows + 1
            self.numbers[:used].copy_(slot[:used], non_blocking=True)

    def _parts(self, numbers: Tensor, rows: int) -> Pairs[Tensor]:
        pair, order, lane, symbol, begin = torch.split(
            numbers[: 2 * self.places + 3 * rows + 1], [self.places, self.places, rows, rows, rows + 1]
        )
        return Pairs(lane, symbol, pair, order, begin)

    def step(self) -> None:
        """Eager at first, on the side stream a capture wants; then captures; then replays."""
        self.calls += 1
        rows = 0 if self.pairs is None else self.pairs.lane.shape[0]
        if self.calls <= self.EAGER or rows not in self.seen:
            self.seen.add(rows)
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                super().step()
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if rows not in self.graphs:
            # Gradients made inside the capture live in the graph's own memory and stay where they are.
            self.optimiser.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            # Graphs that run one after the other can use the same memory.
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                super().step()
            self.graphs[rows] = graph
        self.graphs[rows].replay()


def make(
    model: LanguageModel, recipe: Recipe, generator: torch.Generator, share: Share | None = None
) -> Update:
    """The update for the device the model is on."""
    # Cells without a factor that could shut the state out are cut where records begin: no graph holds that.
    cut = bool(recipe.data.records) and model.recipe.cell in ("lstm", "rnn", "tensor-rnn")
    kind = GraphedUpdate if model.device.type == "cuda" and not cut else Update
    return kind(model, recipe, generator, share)
