"""The kernels in Triton on a CPU, for a process with TRITON_INTERPRET=1: prints each check's error as JSON.

The interpreter has no bf16 products and no machine instructions, and programs run one after another, so that
they never meet: fp16, nothing launched early, whole chunks of a single group of units. Whole models run in
bf16 all the same, their products being torch's.
"""

from __future__ import annotations

import copy
import json
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

from distance import rms
from emulated import Emulated
from mulstm import optim
from mulstm.nn import packed
from mulstm.nn.masks import Masks
from mulstm.nn.model import LanguageModel
from mulstm.ops import (
    cuda_steps,
    faults,
    reference,
    triton_layer,
    triton_loss,
    triton_recurrence,
    triton_steps,
)
from mulstm.ops import triton_small as small
from mulstm.ops.reference import State
from mulstm.ops.triton_cell import from_packed, to_packed
from mulstm.ops.triton_choice import agree
from mulstm.ops.triton_chunk import Chunk
from mulstm.ops.triton_plan import Form, Plan, Tile
from mulstm.ops.triton_sample import Sampler
from mulstm.ops.triton_steps import backward, forward
from mulstm.recipe import InitRecipe, ModelRecipe, OptimiserRecipe

T, B, N = 3, 5, 7
PLAIN = Plan(pdl=False)
TILES = Plan(
    m=Tile(16, 16, 16, 4, 1),
    gates=Tile(16, 64, 16, 4, 1),
    dm=Tile(16, 16, 16, 4, 1, split=3),
    dh=Tile(16, 16, 16, 4, 1, split=2),
    pdl=False,
)
WHOLE = Plan(lanes=16)

_patched = interpreter._patch_lang_tensor


def _patch(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes int() of an array of one number, which NumPy 2.4 refuses."""
    _patched(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch


def drawn(cell: str, unit: str, H: int) -> Chunk:
    """Random numbers of fp16's, z in packed order."""
    blocks = reference.blocks(unit)

    def numbers(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape) * scale).half()

    multiplies = cell == "mlstm"
    return Chunk(
        numbers(T, B, H) if multiplies else None, to_packed(numbers(T, B, blocks * H), blocks, H),
        numbers(T, B, blocks * H) if cell == "milstm" else None,
        numbers(H, H, scale=H**-0.5) if multiplies else None, numbers(blocks * H, H, scale=H**-0.5),
        numbers(B, H, scale=0.5), torch.randn(B, H if blocks > 1 else 0),
        (torch.rand(B, H) < 0.8).float() / 0.8,
        torch.randn(H) if unit == "initial" else None, unit,
    )  # fmt: skip


def unpacked(x: Tensor, blocks: int, H: int) -> Tensor:
    """In float64 and in the reference's order of gates, along the last axis."""
    return from_packed(x.double(), blocks, H)


def chunk_error(plan: Plan, cell: str = "mlstm", unit: str = "standard", H: int = 32) -> float:
    """The largest of h's, c's and all gradients' against the reference in float64."""
    chunk = drawn(cell, unit, H)
    blocks = reference.blocks(unit)
    saved = forward(chunk, plan, save=True)
    dh = torch.randn(T, B, H).half()
    found = backward(chunk, saved, dh, None, None, plan)
    exact = {
        "zx": unpacked(chunk.zx, blocks, H),
        "W_zm": unpacked(chunk.W_zm.t(), blocks, H).t(),
        "h_0": chunk.h_0.double(),
        "c_0": chunk.c_0.double(),
    }
    if chunk.mx is not None and chunk.W_mh is not None:
        exact |= {"mx": chunk.mx.double(), "W_mh": chunk.W_mh.double()}
    if chunk.px is not None:
        exact["px"] = unpacked(chunk.px, blocks, H)
    if chunk.b_h is not None:
        exact["b_h"] = chunk.b_h.double()
    exact = {name: x.clone().requires_grad_() for name, x in exact.items()}
    h, last = reference.recurrence(
        exact.get("mx"), exact["zx"], exact.get("W_mh"), exact["W_zm"], State(exact["h_0"], exact["c_0"]),
        chunk.mask, exact.get("px"), exact.get("b_h"), unit,
    )  # fmt: skip
    (h * dh.double()).sum().backward()
    ours = {"zx": unpacked(found.dz, blocks, H), "h_0": found.dh_0, "c_0": found.dc_0}
    pairs = [(saved.h[1:], h.detach())]
    if blocks == 1:
        del ours["c_0"]
    else:
        pairs.append((saved.c_T, last.c.detach()))
    if found.dmx is not None:
        ours["mx"] = found.dmx
    if found.dpx is not None:
        ours["px"] = unpacked(found.dpx, blocks, H)
    if found.db_h is not None:
        ours["b_h"] = found.db_h.sum(0)
    pairs += [(x, exact[name].grad) for name, x in ours.items()]  # type: ignore[misc]
    return max(rms(a, b) for a, b in pairs)


def sampler_error(cell: str, H: int = 64, streams: int = 2) -> float:
    """h after a step that reads a symbol."""
    table = torch.randn(N, (5 if cell == "mlstm" else 4) * H)
    W_mh = (torch.randn(H, H) * H**-0.5).half() if cell == "mlstm" else None
    W_zm, W_out = (torch.randn(4 * H, H) * H**-0.5).half(), torch.randn(N, H).half()
    work = Sampler(table, W_mh, W_zm, None, W_out, None, "standard", streams, 1, greedy=True, pdl=False)
    symbols, before = torch.arange(streams), State(torch.randn(streams, H), torch.randn(streams, H))
    work.start(before.h, before.c, symbols, 1.0)
    work._step(0)
    row = table[symbols].double()
    wanted = reference.step(
        None if W_mh is None else row[:, :H], unpacked(row[:, -4 * H :], 4, H),
        None if W_mh is None else W_mh.double(), unpacked(W_zm.t(), 4, H).t(),
        State(before.h.double(), before.c.double()),
    )  # fmt: skip
    assert torch.equal(work.drawn[0].long(), (wanted.h @ W_out.double().T).argmax(-1))
    return rms(work.h, wanted.h)


def trial_forgets() -> float:
    """0 where a trial whose programs waited in vain is lost and leaves no flag, but for one that it found."""
    here, chunk = torch.device("cpu"), drawn("mlstm", "standard", 64)  # two groups of units, which never meet
    patience, small.SPINS = small.SPINS, 3
    wrong = agree(chunk, WHOLE, PLAIN) or faults.failed(here)
    faults.flag(here).fill_(1)
    wrong |= agree(chunk, PLAIN, PLAIN) or not faults.failed(here)
    faults.forget(here)
    small.SPINS = patience
    narrow = drawn("mlstm", "standard", 32)
    works = all(
        agree(x, one, PLAIN, save) for x, one in ((chunk, PLAIN), (narrow, WHOLE)) for save in (True, False)
    )
    return float(wrong or not works)


def by_columns(x: Tensor) -> Tensor:
    """The same numbers, the last two axes the other way round in memory."""
    return x.transpose(-2, -1).contiguous().transpose(-2, -1)


def op_error(cell: str, plan: Plan, kind: torch.dtype, H: int) -> float:
    """The backend's h and gradients against float64; 1 more where h is another without gradients.

    Inputs that need no padding do not lie in memory as the kernels read them.
    """
    triton_recurrence.plan_for = lambda chunk, save=True: plan
    chunk = drawn(cell, "standard", H)
    given = {"mx": chunk.mx, "zx": chunk.zx, "W_mh": chunk.W_mh, "W_zm": chunk.W_zm, "px": chunk.px}
    state = State(by_columns(chunk.h_0.to(kind)), by_columns(chunk.c_0))
    ours = {name: None if x is None else by_columns(x.to(kind)) for name, x in given.items()}
    exact = {name: None if x is None else x.double().requires_grad_() for name, x in ours.items()}
    leaves = [x.requires_grad_() for x in ours.values() if x is not None]
    h, after = triton_recurrence.recurrence(**ours, state=state, mask=by_columns(chunk.mask))
    wanted, last = reference.recurrence(
        **exact, state=State(*(x.double() for x in state)), mask=chunk.mask.double()
    )
    with torch.no_grad():
        again, _ = triton_recurrence.recurrence(**ours, state=state, mask=chunk.mask)
    dc = by_columns(torch.randn(B, H))
    truth = [x for x in exact.values() if x is not None]
    found = torch.autograd.grad([h, after.c], leaves, [h.detach(), dc])
    truth = torch.autograd.grad([wanted, last.c], truth, [h.detach().double(), dc.double()])
    pairs = [(h.detach(), wanted.detach()), *zip(found, truth, strict=True)]
    return max(rms(a, b) for a, b in pairs) + float(not torch.equal(again, h))


class Here:
    """In the place of a second stream: all work in its order."""

    def __init__(self, device: torch.device) -> None:
        pass

    fork = staticmethod(nullcontext)

    def mark(self) -> None:
        pass

    def until(self, mark: None) -> None:
        pass

    join = mark


def model_error(cell: str, columns: bool = False, **wiring: Any) -> float:
    """The largest error of a whole model's loss and gradients in bf16, against float64.

    With `columns` its matrices lie transposed in memory.
    """
    recipe = ModelRecipe(cell=cell, hidden=40, output_bias=True, **wiring)
    model = LanguageModel(recipe, 30)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
            if columns and p.dim() == 2:
                p.data = by_columns(p.data)
    model.precision = "bf16"
    x, y = torch.randint(30, (2, T, B))  # (T, B)
    y[0, 0] = y[2, 3] = -1  # nothing is to be predicted there
    hs, _ = packed.run(model, x, model.zero_state(B), Masks(), None)
    loss = packed.loss(model, hs, y, Masks())
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()))
    twin = copy.deepcopy(model).double()
    logits, _ = twin(x.t())
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.t().flatten(), ignore_index=-1)
    truth = torch.autograd.grad(wanted, [p for p in twin.parameters() if p.requires_grad])
    return max(rms(a, b) for a, b in zip((loss.detach(), *found), (wanted.detach(), *truth), strict=True))


def eight_error(of_state: bool = False) -> float:
    """A whole model's with 8-bit products; `of_state`: of the last state's gradients alone."""
    form = Form(128, 128, 4, parts=2, fused=False)
    plan = Plan(m=form, gates=replace(form, fused=True), dm=form, dh=form, pdl=False, eight=True)
    for name in ("m_step", "gates_step", "sums_in_eight"):
        setattr(cuda_steps, name, getattr(Emulated, name))
    triton_layer.plan_for = lambda chunk, save=True: plan
    packed.no_eight = lambda *_: None
    start = InitRecipe(forget_bias=1.0, embedding_range=2.0)  # else m would be too small for 8 bits
    model = LanguageModel(ModelRecipe(hidden=600, embedding=8, weight_norm=True), 30, start)
    x, y = torch.randint(30, (2, T, B))
    masks = Masks(hidden=((torch.rand(B, 600) < 0.8).float() / 0.8,))
    found = []
    for model.precision in ("fp8", "fp64"):
        model = model.double() if model.precision == "fp64" else model
        if model.precision == "fp8":
            hs, states = packed.run(model, x, model.zero_state(B), masks, None)
            loss = packed.loss(model, hs, y, masks)
        else:
            loss, states = model.loss(x.t(), y.t(), None, masks)
        given = (1e-6 * states[0].c).sum() if of_state else loss
        named = [model.stack[0].W_mh, model.stack[0].W_zm, model.stack[0].W_zx, model.embedding]
        found.append([given.detach(), *torch.autograd.grad(given, named)])
    return max(rms(a, b) for a, b in zip(*found, strict=True))


def frees() -> float:
    """0 where what a layer kept for its backward is gone after it, though the loss is not."""
    kept = []

    def watched(*given: Any, **options: Any) -> Any:
        saved = forward(*given, **options)
        kept.append(weakref.ref(saved.z))
        return saved

    model = LanguageModel(ModelRecipe(hidden=40, layers=2), 30)
    model.precision = "bf16"
    x, y = torch.randint(30, (2, T, B))
    triton_steps.forward = watched
    hs, _ = packed.run(model, x, model.zero_state(B), Masks(), None)
    triton_steps.forward = forward
    loss = packed.loss(model, hs, y, Masks())
    del hs
    alive = [z() is not None for z in kept]
    loss.backward()
    return float(alive != [True, True] or any(z() is not None for z in kept))


def masks_error() -> float:
    """How much it matters whether one mask stands for all lanes or each has a copy; 1 if neither does."""
    model = LanguageModel(ModelRecipe(hidden=32, embedding=8), 30)  # widths that need no padding
    model.precision = "bf16"
    x, y = torch.randint(30, (2, T, B))

    def loss(masks: Masks) -> float:
        hs, _ = packed.run(model, x, model.zero_state(B), masks, None)
        return packed.loss(model, hs, y, masks).item()

    e, h = ((torch.arange(width) % 2 * 2.0).expand(B, width) for width in (8, 32))
    ours = loss(Masks(e.bool().double() * 2, (h,)))
    copies = loss(Masks(e.contiguous(), (h.contiguous(),)))
    return abs(ours - copies) + float(copies == loss(Masks()))


def strangers() -> float:
    """0 where what is no symbol gives NaN, and everything else a number."""
    model = LanguageModel(ModelRecipe(hidden=40, embedding=8), 30)
    model.precision = "bf16"
    weights = packed.pack(model)
    wrong = 0
    for symbol, target, lost in (
        (29, 29, False),
        (30, 29, True),
        (-1, 29, True),
        (29, 30, True),
        (29, -1, False),
    ):
        x, y = torch.zeros(2, T, B, dtype=torch.long)
        x[1, 2], y[1, 2] = symbol, target
        with torch.no_grad():
            hs, _ = packed.run(model, x, model.zero_state(B), Masks(), weights)
            nats = packed.losses(model, hs, y, weights)
        others = torch.cat([nats[:, :2], nats[:, 3:]], dim=1)
        wrong += bool(nats[1, 2].isnan()) != lost or not bool(others.isfinite().all())
    return float(wrong)


def coldest() -> float:
    """0 where the likeliest symbol is drawn at a temperature that fp32 takes for 0."""
    H = 64
    W_zm, W_out = (torch.randn(4 * H, H) * H**-0.5).half(), torch.randn(N, H).half()
    work = Sampler(
        torch.randn(N, 4 * H), None, W_zm, None, W_out, None, "standard", 1, 1, greedy=False, pdl=False
    )
    wrong = 0
    for symbol in range(N):
        work.start(torch.randn(1, H), torch.randn(1, H), torch.tensor([symbol]), 1e-46)
        work.dice.fill_(0.5)
        work._step(0)
        wrong += int(work.drawn[0, 0]) != int(work.logits[0].argmax())
    return float(wrong)


def adam_error(name: str) -> float:
    """How far the kernel's parameters and memories are from those of float64 after three updates."""
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 700), (5,), (2050,))]
    theirs = [torch.nn.Parameter(p.detach().double()) for p in ours]
    recipe = OptimiserRecipe(name=name, weight_decay=0.1)
    rate = torch.tensor(1e-2)
    one, other = (optim.build(recipe, [(str(k), p) for k, p in enumerate(ps)], rate) for ps in (ours, theirs))
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.double()
        optim._fused_adam(one, 0.5)
        optim.clip_and_step(other, theirs, 0.5)
    pairs = list(zip(ours, theirs, strict=True))
    pairs += [(one.state[p][what], other.state[q][what]) for p, q in pairs for what in other.state[q]]
    return max(rms(a.detach(), b.detach()) for a, b in pairs)


def main() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    errors = {
        "plain mlstm": chunk_error(PLAIN),
        "plain initial": chunk_error(PLAIN, unit="initial"),
        "plain initial-text": chunk_error(PLAIN, unit="initial-text"),
        "plain lstm": chunk_error(PLAIN, "lstm"),
        "plain milstm": chunk_error(PLAIN, "milstm"),
        "plain tanh": chunk_error(PLAIN, "rnn", "tanh"),
        "tiles mlstm": chunk_error(TILES),
        "tiles initial": chunk_error(TILES, unit="initial"),
        "tiles lstm": chunk_error(replace(TILES, m=None), "lstm"),
        "whole mlstm": chunk_error(WHOLE),
        "whole lstm": chunk_error(WHOLE, "lstm"),
        "sampler mlstm": sampler_error("mlstm"),
        "sampler lstm": sampler_error("lstm"),
        "sampler coldest": coldest(),
        "trial": trial_forgets(),
        "optimiser adamw": adam_error("adamw"),
        "optimiser adam": adam_error("adam"),
    }
    torch.cuda.device = lambda device: nullcontext()
    triton_layer.Beside = triton_loss.Beside = Here
    triton_layer.plan_for = lambda chunk, save=True: PLAIN
    errors |= {
        "op mlstm": op_error("mlstm", PLAIN, torch.bfloat16, 48),
        "op milstm": op_error("milstm", PLAIN, torch.bfloat16, 48),
        "op tiles": op_error("mlstm", TILES, torch.float16, 32),
        "op whole": op_error("mlstm", WHOLE, torch.float16, 32),
        "frees": frees(),
        "masks": masks_error(),
        "strangers": strangers(),
        "model by columns": model_error("mlstm", columns=True, embedding=8, weight_norm=True),
        "model mlstm": model_error("mlstm", embedding=8, weight_norm=True),
        "model initial": model_error("mlstm", unit="initial"),
        "model lstm": model_error("lstm", layers=2, skip=True),
        "model milstm": model_error("milstm"),
        "model mrnn": model_error("mrnn"),
    }
    errors |= {"eight": eight_error(), "eight state": eight_error(of_state=True)}
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
