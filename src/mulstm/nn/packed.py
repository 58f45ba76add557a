"""The language model on a GPU in bf16: nn.model's function, through packed weights and fused ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from mulstm.data.pairs import Pairs
from mulstm.errors import BackendError
from mulstm.ops import State, blocks, faults, modes, objections

if TYPE_CHECKING:
    from mulstm.nn.layer import Layer
    from mulstm.nn.masks import Masks
    from mulstm.nn.model import LanguageModel
    from mulstm.recipe import ModelRecipe


P = ParamSpec("P")
R = TypeVar("R")


def _there(work: Callable[Concatenate[LanguageModel, P], R]) -> Callable[Concatenate[LanguageModel, P], R]:
    """With the model's GPU as the current one: a kernel starts there, whatever its arguments are on."""

    @wraps(work)
    def run(model: LanguageModel, /, *args: P.args, **options: P.kwargs) -> R:
        with torch.cuda.device(model.device):
            return work(model, *args, **options)

    return run


class PackedWeights(NamedTuple):
    """What the parameters alone decide, ready for a chunk without gradients."""

    layers: list[Any]  # ops.triton_layer.Packed
    output: list[Tensor]


def serves(model: LanguageModel, first: Tensor | None = None) -> bool:
    """Whether this way is open: a GPU that Triton knows, bf16 or fp8 of fp32 weights, no text begun in it,
    and nothing but weights that make the model what it is."""
    if (
        not model.W_out.is_cuda
        or model.W_out.dtype != torch.float32
        or model.precision not in ("bf16", "fp8")
        or model.backend not in ("auto", "triton")
    ):
        return False
    if first is not None or model.recipe.cell == "tensor-rnn" or torch.compiler.is_compiling():
        return False
    if modes.objection() is not None or model.is_altered:
        return False
    return _objection(model.device) is None


@cache
def _objection(device: torch.device) -> str | None:
    """Why Triton cannot run there; asked once for each device."""
    return objections(str(device), "bf16")["triton"]


WIDE = 512  # units; below, pairs of lane and symbol are not worth their cost


def no_eight(model: ModelRecipe, lanes: int, mask: bool, device: torch.device) -> str | None:
    """None, or why the recurrent products of training cannot be of 8-bit numbers there."""
    from mulstm.ops.cuda_driver import why_not
    from mulstm.ops.triton_plan import padded, plan_in_eight

    if (why := why_not(device) or _objection(device)) is not None:
        return why
    if model.cell != "mlstm":
        return f"the {model.cell} has no kernels for them"
    if plan_in_eight(padded(model.hidden), lanes) is None:
        return f"{model.hidden} units in {lanes} lanes have no kernels for them"
    from mulstm.ops.triton_choice import eight_works

    with torch.cuda.device(device):
        works = eight_works(padded(model.hidden), lanes, model.unit, mask, device)
    return None if works else "they failed their self-test"


def pairs_pay(model: LanguageModel) -> bool:
    """Whether training gains by making the input product once for each pair of lane and symbol."""
    return model.recipe.hidden > WIDE and serves(model)


def has_failed(device: torch.device | str) -> bool:
    """Whether a kernel gave up waiting there since this was last asked: what was made meanwhile is void."""
    failed = faults.failed(device)
    if failed:
        faults.forget(device)  # another backend may follow
    return failed


def check_kernels(device: torch.device | str) -> None:
    """Raises BackendError if a kernel gave up waiting: what was made since the last call means nothing."""
    if has_failed(device):
        raise BackendError(
            f"A kernel waited in vain for its neighbours on {device}, so that its results mean nothing. "
            "Try again with the backend fused."
        )


@_there
def run(
    model: LanguageModel,
    x: Tensor,  # (T, B)
    state: tuple[State, ...],
    masks: Masks,
    weights: PackedWeights | None,
    pairs: Pairs[Tensor] | None = None,
) -> tuple[list[Tensor], tuple[State, ...]]:
    """h of every layer, (T, B, padded H), and the states. With `weights` there are no gradients.

    With `pairs`, which must be those of x, what depends on a symbol is computed once for each pair.
    """
    from mulstm.ops.triton_layer import LayerFunction, infer
    from mulstm.ops.triton_loss import EmbedFunction

    masks = _as_read(masks)
    symbols, lanes = (x.contiguous(), None) if pairs is None else (pairs.symbol, pairs.lane)
    rows: Tensor = EmbedFunction.apply(  # type: ignore[no-untyped-call]
        symbols, lanes, model.embedding, masks.embedding, model.alphabet_size
    )
    eight = weights is None and model.precision == "fp8"
    eight = eight and no_eight(model.recipe, x.shape[1], bool(masks.hidden), x.device) is None
    hs: list[Tensor] = []
    states: list[State] = []
    for k, layer in enumerate(model.stack):
        below = hs[-1].flatten(0, 1) if hs else None
        from_symbols = k == 0 or model.recipe.skip
        inputs: Tensor = rows if from_symbols or below is None else below
        low = below if from_symbols else None
        spec = _spec(layer, from_symbols, eight)
        mask = masks.hidden[k] if masks.hidden else None
        h_0, c_0 = state[k]
        h_0 = h_0.to(torch.bfloat16)
        if weights is not None:
            h, h_T, c_T = infer(spec, weights.layers[k], inputs, low, h_0, c_0, mask)
        else:
            p = layer.named()
            drop = masks.weights[k] if masks.weights else {}
            of = pairs if from_symbols else None
            h, h_T, c_T = LayerFunction.apply(  # type: ignore[no-untyped-call]
                spec, tuple(p), drop, of, inputs, low, h_0, c_0, mask, *p.values()
            )
        hs.append(h)
        states.append(State(h_T[:, : spec.H], c_T[:, : c_0.shape[1]]))
    return hs, tuple(states)


def _as_read(masks: Masks) -> Masks:
    """As the kernels read them: one mask may stand for all lanes, or be of another type."""

    def plain(mask: Tensor | None) -> Tensor | None:
        return None if mask is None else mask.float().contiguous()

    return masks._replace(
        embedding=plain(masks.embedding), hidden=tuple(plain(mask) for mask in masks.hidden)
    )


def mask(u: Tensor, p: Tensor) -> Tensor:
    """A dropout mask from uniform numbers, which drops the share p."""
    from mulstm.ops.triton_masks import mask_of

    with torch.cuda.device(u.device):
        return mask_of(u, p)


def _spec(layer: Layer, from_symbols: bool, eight: bool = False) -> Any:
    from mulstm.ops.triton_layer import Spec

    return Spec(layer.hidden, blocks(layer.unit), layer.unit, layer.learn_b_h, from_symbols, eight)


@_there
def pack(model: LanguageModel) -> PackedWeights:
    """All weights, for chunks without gradients."""
    from mulstm.ops.triton_layer import pack as pack_layer
    from mulstm.ops.triton_loss import pack_output

    layers = []
    for k, layer in enumerate(model.stack):
        spec = _spec(layer, k == 0 or model.recipe.skip)
        p = {name: value.detach() for name, value in layer.named().items()}
        layers.append(pack_layer(spec, p, {}, spec.width(layer.inputs)))
    return PackedWeights(layers, pack_output(model.W_out.detach(), model.recipe.hidden))


def _read(model: LanguageModel, hs: list[Tensor], mask: Tensor | None = None) -> list[Tensor]:
    """The h that the output reads, masked."""
    read = hs if model.recipe.skip else hs[-1:]
    if mask is None:
        return read
    H, HP = model.recipe.hidden, read[0].shape[-1]
    kept = torch.split(mask.to(torch.bfloat16), H, dim=1)
    return [h * torch.nn.functional.pad(part, (0, HP - H)) for h, part in zip(read, kept, strict=True)]


@_there
def logits(model: LanguageModel, hs: list[Tensor], masks: Masks, weights: PackedWeights | None) -> Tensor:
    """(T, B, N) in fp32."""
    from mulstm.ops.triton_loss import logits_of

    read, N = _read(model, hs, masks.output), model.alphabet_size
    T, B = hs[0].shape[:2]
    if weights is not None:
        y = logits_of(read, weights.output)[:, :N]
        y = y if model.b_out is None else y + model.b_out
        return y.view(T, B, N)
    h = torch.cat([h[..., : model.recipe.hidden] for h in read], dim=-1)
    return torch.nn.functional.linear(h.float(), model.W_out, model.b_out)


@_there
def loss(model: LanguageModel, hs: list[Tensor], y: Tensor, masks: Masks) -> Tensor:
    """The mean nats of the targets y (T, B) that are not negative."""
    from mulstm.ops.triton_loss import LossFunction

    read = _read(model, hs, masks.output)
    mean: Tensor = LossFunction.apply(  # type: ignore[no-untyped-call]
        y.contiguous(), model.recipe.hidden, model.W_out, model.b_out, *read
    )
    return mean


@_there
def losses(model: LanguageModel, hs: list[Tensor], y: Tensor, weights: PackedWeights) -> Tensor:
    """The nats of each target y (T, B), 0 where it is negative; no gradients."""
    from mulstm.ops.triton_loss import logits_of, losses_of

    sums = logits_of(_read(model, hs), weights.output)
    return losses_of(sums, model.b_out, y.contiguous(), model.alphabet_size)[0].view_as(y)


@torch.no_grad()
def sampler(model: LanguageModel, streams: int, greedy: bool, steps: int = 64) -> Any:
    """ops.triton_sample.Sampler for a folded model, or None where it is not made for it."""
    r, N = model.recipe, model.alphabet_size
    if not serves(model) or r.layers > 1 or r.embedding or r.cell not in ("mlstm", "lstm"):
        return None
    from mulstm.ops.triton_sample import MOST_STREAMS, Sampler

    if streams > MOST_STREAMS:
        return None
    weights = pack(model)
    w = weights.layers[0]
    # A one-hot input picks a column of W_x; the bias stands in the two columns behind the alphabet.
    table = w.W_x[:, :N].t().float() + w.W_x[:, N].float() + w.W_x[:, N + 1].float()
    b_out = None if model.b_out is None else model.b_out.detach()
    return Sampler(table, w.W_mh, w.W_zm, w.b_h, weights.output[0], b_out, r.unit, streams, steps, greedy)
