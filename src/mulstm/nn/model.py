"""The language model of the paper: symbols and a state to logits and a state."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from mulstm import recipe as recipes
from mulstm.data.pairs import Pairs
from mulstm.errors import RecipeError
from mulstm.nn import packed
from mulstm.nn.initial import initialise
from mulstm.nn.kept import Keeping, Kept, parameters_of
from mulstm.nn.layer import (
    Layer,
    Tables,
    Weights,
    hooks_of,
    look_up,
    make_anew,
    project,
    rows_of,
    tables,
    time_first,
)
from mulstm.nn.masks import Masks, draw_masks, require_masks
from mulstm.ops import State, modes
from mulstm.recipe import LSTM_TYPE, DropoutRecipe, InitRecipe, ModelRecipe

PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,  # but for the recurrent products of training, on GPUs that have kernels for them
    "fp64": torch.float64,
}
FUNCTION = ("forward", "hidden_and_logits", "output", "loss", "losses", "hidden")  # methods that compute
F = TypeVar("F", bound=Callable[..., Any])


def _precise(method: F) -> F:
    """A model's method with autocast off: `precision` says what computes."""

    @functools.wraps(method)
    def run(self: LanguageModel, *args: Any, **kwargs: Any) -> Any:
        with modes.without_autocast(self.device):
            return method(self, *args, **kwargs)

    return cast(F, run)


class Prepared(NamedTuple):
    """Everything the parameters alone decide, ready for a chunk."""

    embedding: Tensor | None  # (N, E), cast
    layers: tuple[Weights, ...]
    tables: tuple[Tables | None, ...]  # None where a layer's input is not the bare symbol


class LanguageModel(Keeping):
    """A model of a text's next symbol. Dropout is not its business: masks are handed in.

    `precision` says what computes, whatever autocast says. Second derivatives want backend = "reference". In
    evaluation weights are prepared once: after a change through `.data` call `forget()`.
    """

    embedding: nn.Parameter | None
    b_out: nn.Parameter | None

    def __init__(
        self, recipe: ModelRecipe, alphabet_size: int, init: InitRecipe | None = InitRecipe()
    ) -> None:
        """Starts from `init`; None leaves zeros, for weights that are loaded or drawn later."""
        super().__init__()
        recipes.from_dict({"model": asdict(recipe)}, source="the model")  # told of now, not by who loads it
        if alphabet_size < 1:
            raise RecipeError(f"An alphabet of {alphabet_size} symbols is none. Give at least 1.")
        self.recipe, self.alphabet_size = recipe, alphabet_size
        self.backend, self.precision = "auto", "fp32"
        self._kept: Kept[Prepared] = Kept()
        self._kept_packed: Kept[packed.PackedWeights] = Kept()
        N, H, E = alphabet_size, recipe.hidden, recipe.embedding
        self.embedding = nn.Parameter(torch.zeros(N, E)) if E else None
        self.layers = nn.ModuleList(
            Layer(
                recipe.cell,
                (E or N) if k == 0 or recipe.skip else H,
                H,
                unit=recipe.unit,
                lower=H if k > 0 and recipe.skip else 0,
                symbols=N,
                weight_norm=recipe.weight_norm,
                learn_b_h=recipe.learn_b_h,
            )
            for k in range(recipe.layers)
        )
        self.W_out = nn.Parameter(torch.zeros(N, H * (recipe.layers if recipe.skip else 1)))
        self.b_out = nn.Parameter(torch.zeros(N)) if recipe.output_bias else None
        if init is not None and self.device.type != "meta":
            self.initialise(init)

    @_precise
    def forward(
        self,
        x: Tensor,  # (B, T)  symbols
        state: tuple[State, ...] | None = None,
        masks: Masks | None = None,
        first: Tensor | None = None,  # (B, T)  true where a text begins: nothing before it is remembered
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Logits (B, T, N), never less than float32, and the state after the chunk."""
        _, logits, states = self.hidden_and_logits(x, state, masks, first)
        return logits, states

    @_precise
    def hidden_and_logits(
        self,
        x: Tensor,
        state: tuple[State, ...] | None = None,
        masks: Masks | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, tuple[State, ...]]:
        """What `hidden` and the model itself give, in one pass."""
        if packed.serves(self, first):
            weights = self._packed(masks)
            hs, states = self._run_packed(x, state, masks, weights)
            logits = packed.logits(self, hs, masks or Masks(), weights)
        else:
            hs, states = self._run(x, state, masks, first)
            logits = self.output(hs, None if masks is None else masks.output)
        return time_first(hs[-1][..., : self.recipe.hidden]), time_first(logits), states

    @_precise
    def output(self, hs: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """Logits from h of every layer, (..., B, H) each: never less than float32."""
        make_anew(self)
        h = torch.cat(list(hs), dim=-1) if self.recipe.skip else hs[-1]
        if mask is not None:
            h = h * mask.to(h.dtype)
        wide = torch.promote_types(h.dtype, torch.float32)
        b_out = None if self.b_out is None else self.b_out.to(wide)
        return nn.functional.linear(h.to(wide), self.W_out.to(wide), b_out)

    @_precise
    def loss(
        self,
        x: Tensor,  # (B, T)  symbols
        y: Tensor,  # (B, T)  what follows each; below 0: nothing
        state: tuple[State, ...] | None = None,
        masks: Masks | None = None,
        first: Tensor | None = None,
        pairs: Pairs[Tensor] | None = None,  # of x, where the fused kernels are to use them
    ) -> tuple[Tensor, tuple[State, ...]]:
        """The mean nats of a symbol and the state after the chunk: on a GPU by fused kernels."""
        y = _targets(y, x)
        if packed.serves(self, first) and torch.is_grad_enabled():
            hs, states = self._run_packed(x, state, masks, None, pairs)
            return packed.loss(self, hs, time_first(y), masks or Masks()), states
        logits, states = self(x, state, masks, first)
        nats = _cross_entropy(logits, y, "sum")
        return nats / (y >= 0).sum().clamp(min=1), states  # one process of several may have no symbol

    @_precise
    def losses(
        self,
        x: Tensor,  # (B, T)
        y: Tensor,  # (B, T)  below 0: no loss
        state: tuple[State, ...] | None = None,
    ) -> tuple[Tensor, tuple[State, ...]]:
        """The nats of each symbol, (B, T), and the state after the chunk; without gradients."""
        y = _targets(y, x)
        with torch.no_grad():
            if packed.serves(self):
                weights = self._packed(None)
                hs, states = self._run_packed(x, state, None, weights)
                assert weights is not None
                return time_first(packed.losses(self, hs, time_first(y), weights)), states
            logits, states = self(x, state)
            return _cross_entropy(logits, y, "none").view_as(y), states

    @_precise
    def hidden(
        self,
        x: Tensor,
        state: tuple[State, ...] | None = None,
        masks: Masks | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, tuple[State, ...]]:
        """h of the last layer, (B, T, H), and the state after the chunk."""
        if packed.serves(self, first):
            hs, states = self._run_packed(x, state, masks, self._packed(masks))
            return time_first(hs[-1][..., : self.recipe.hidden]), states
        hs, states = self._run(x, state, masks, first)
        return time_first(hs[-1]), states

    def _run(
        self, x: Tensor, state: tuple[State, ...] | None, masks: Masks | None, first: Tensor | None
    ) -> tuple[list[Tensor], tuple[State, ...]]:
        """h of every layer, time first, and the states."""
        masks, dtype = masks or Masks(), self.dtype
        state = self._start(x, state, masks)
        if first is not None:
            _require_alike("first", first, x)
            first = time_first(first).bool()
        x = time_first(x).long()
        prepared = self._prepared(masks, x.numel(), dtype)
        hs: list[Tensor] = []
        states: list[State] = []
        for k, layer in enumerate(self.stack):
            low = hs[-1] if hs else None
            mx, zx, px = self._input(prepared, k, x, low, masks.embedding)
            h_0, c_0 = state[k]
            prev = State(h_0.to(dtype), c_0)
            mask = masks.hidden[k] if masks.hidden else None
            h, after = layer(prepared.layers[k], mx, zx, px, prev, mask, self.backend, x, first)
            hs.append(h)
            # The state's owner may change it, and a backward wants the last h and c as they were.
            states.append(State(after.h.clone(), after.c.clone()))
        return hs, tuple(states)

    def _run_packed(
        self,
        x: Tensor,
        state: tuple[State, ...] | None,
        masks: Masks | None,
        weights: packed.PackedWeights | None,
        pairs: Pairs[Tensor] | None = None,
    ) -> tuple[list[Tensor], tuple[State, ...]]:
        """h of every layer, time first and padded, and the states."""
        if weights is None:
            self.forget()
        masks = masks or Masks()
        state = self._start(x, state, masks)
        return packed.run(self, time_first(x).long(), state, masks, weights, pairs)

    def _start(self, x: Tensor, state: tuple[State, ...] | None, masks: Masks) -> tuple[State, ...]:
        """The state to begin with; ValueError where something has not the form that is wanted."""
        if x.dim() != 2 or x.shape[1] == 0 or x.is_floating_point():
            raise ValueError(f"x is {x.dtype} of shape {tuple(x.shape)}. Give symbols, (B, T), T at least 1.")
        B, H = x.shape[0], self.recipe.hidden
        require_masks(masks, self, B)
        if state is None:
            return self.zero_state(B)
        # Kernels would read a state of other shapes without a word, or beyond it.
        shapes = (B, H), (B, self.c_width)
        given = [tuple(v.shape for v in one) if isinstance(one, (tuple, list)) else () for one in state]
        if given != [shapes] * self.recipe.layers:
            raise ValueError(
                f"The state has not, for each layer, h and c of shapes {shapes}. "
                "Give the one that the chunk before left, or None."
            )
        return state

    @property
    def c_width(self) -> int:
        """How many numbers of c a layer has: H, or 0 where the cell has no c."""
        return self.recipe.hidden if self.recipe.cell in LSTM_TYPE else 0

    def _packed(self, masks: Masks | None) -> packed.PackedWeights | None:
        """Packed weights, kept until a parameter changes; None where gradients or DropConnect are wanted."""
        if torch.is_grad_enabled() or (masks is not None and masks.weights):
            return None
        return self._kept_packed.get(parameters_of(self), None, lambda: packed.pack(self))

    def _input(
        self, prepared: Prepared, k: int, x: Tensor, low: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """mx, zx and px of layer k."""
        table, w = prepared.tables[k], prepared.layers[k]
        if table is not None and mask is None:
            return look_up(table, x)
        if low is not None and not self.recipe.skip:
            return project(w, low, None, None)
        if prepared.embedding is None:
            return project(w, None, x, low)
        e = rows_of(prepared.embedding, x)
        return project(w, e if mask is None else e * mask.to(e.dtype), None, low)

    def _prepared(self, masks: Masks, symbols: int, dtype: torch.dtype) -> Prepared:
        """Weights as they act. In evaluation they are kept until a parameter changes."""
        if not self.keeps_or_forgets() or masks.weights:
            # An exported program is to take any number of lanes.
            is_worth_it = torch.compiler.is_exporting() or symbols >= self.alphabet_size
            return self._prepare(masks, tabled=masks.embedding is None and is_worth_it)
        return self._kept.get(parameters_of(self), dtype, self._prepare_to_keep)

    def _prepare_to_keep(self) -> Prepared:
        prepared = self._prepare(Masks(), tabled=True)
        return prepared._replace(layers=tuple(w.kept() for w in prepared.layers))

    def _prepare(self, masks: Masks, tabled: bool) -> Prepared:
        make_anew(self)
        embedding = None if self.embedding is None else self.embedding.to(self.dtype)
        weights = tuple(
            layer.weights(self.dtype, masks.weights[k] if masks.weights else None)
            for k, layer in enumerate(self.stack)
        )
        first = (tables(weights[0], embedding) if tabled else None,)
        return Prepared(embedding, weights, first + (None,) * (len(weights) - 1))

    @property
    def is_altered(self) -> bool:
        """Whether hooks, or methods of a class of its own, make it another function than its weights do."""
        own = type(self)
        changed = any(getattr(own, name) is not getattr(LanguageModel, name) for name in FUNCTION)
        return changed or any(hooks_of(part) for part in (self, *self.stack))

    @property
    def precision(self) -> str:
        """What computes: "fp32", "bf16", "fp8" or "fp64". Of weights in float64 "fp32" makes "fp64"."""
        return "fp64" if self._precision == "fp32" and self.W_out.dtype == torch.float64 else self._precision

    @precision.setter
    def precision(self, name: str) -> None:
        if name not in PRECISIONS:
            raise RecipeError(f"There is no precision {name!r}. Choose one of: {', '.join(PRECISIONS)}.")
        self._precision = name

    @property
    def dtype(self) -> torch.dtype:
        """The type of h and of the products."""
        return PRECISIONS[self.precision]

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.W_out.device

    def zero_state(self, B: int) -> tuple[State, ...]:
        """The state before the first symbol, for B lanes."""
        H, device = self.recipe.hidden, self.device
        wide = torch.promote_types(self.dtype, torch.float32)
        return tuple(
            State(
                torch.zeros(B, H, dtype=self.dtype, device=device),
                torch.zeros(B, self.c_width, dtype=wide, device=device),
            )
            for _ in range(self.recipe.layers)
        )

    def draw_masks(
        self, B: int, dropout: DropoutRecipe | Any, generator: torch.Generator | None = None
    ) -> Masks | None:
        """New masks for B lanes. `dropout` has the recipe's four shares, as numbers or as device tensors
        (then a mask is drawn whatever their value); None where nothing is dropped."""
        return draw_masks(self, B, dropout, generator)

    def initialise(self, init: InitRecipe, generator: torch.Generator | None = None) -> None:
        """Draws all parameters anew."""
        initialise(self, init, generator)

    @_precise
    @torch.no_grad()
    def folded(self, embedding: bool = True) -> LanguageModel:
        """A copy with weight norm and, unless told otherwise, the embedding multiplied away.

        Where the weights alone are not the function, it is a copy as it stands, with the same hooks.
        """
        if self.is_altered:
            for part in (self, *self.stack):
                make_anew(part)  # what is made keeps its history otherwise, of which there is no copy
            hooks = (hook for part in (self, *self.stack) for hook in hooks_of(part))
            return copy.deepcopy(self, {id(hook): hook for hook in hooks})
        kept = 0 if embedding else self.recipe.embedding
        recipe = replace(self.recipe, embedding=kept, weight_norm=False)
        wide = torch.promote_types(self.W_out.dtype, torch.float32)  # products of narrower weights need room
        with torch.device(self.device):
            model = LanguageModel(recipe, self.alphabet_size, init=None).to(wide)
        make_anew(self)
        model.backend, model.precision = self.backend, self.precision
        model.W_out.copy_(self.W_out)
        if model.embedding is not None and self.embedding is not None:
            model.embedding.copy_(self.embedding)
        if model.b_out is not None and self.b_out is not None:
            model.b_out.copy_(self.b_out)
        for k, (mine, its) in enumerate(zip(self.stack, model.stack, strict=True)):
            w = mine.weights(wide)
            for name in its.matrices:
                W = getattr(w, name)
                from_symbols = name in ("W_zx", "W_mx") and (k == 0 or self.recipe.skip)
                if from_symbols and self.embedding is not None and embedding:
                    W = W @ self.embedding.T.to(wide)
                its.get_parameter(name).copy_(W)
            for name in ("b_z", "alpha", "beta_1", "beta_2"):
                vector = mine.parameter(name)
                if vector is not None:
                    its.get_parameter(name).copy_(vector)
        return model.train(self.training)

    def parameter_count(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.parameters())


def _cross_entropy(logits: Tensor, y: Tensor, reduction: str) -> Tensor:
    """The nats of symbols y, (B, T); where y is below 0 there are none."""
    try:
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), y.flatten().clamp(min=-1), ignore_index=-1, reduction=reduction
        )
    except IndexError:
        N = logits.shape[-1]
        raise ValueError(
            f"A symbol of y is not among the model's {N}. Give 0 to {N - 1}, or -1 where nothing follows."
        ) from None


def bare(model: Any) -> LanguageModel:
    """The model inside what torch.compile, DataParallel or an average of weights wraps it in."""
    inner = model
    while not isinstance(inner, LanguageModel):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if inner is None:
            raise TypeError(
                f"A {type(model).__name__} is no LanguageModel. Give the model itself, as the .model of a "
                "checkpoint is."
            )
    return inner


def _require_alike(name: str, y: Tensor, x: Tensor) -> None:
    if y.shape != x.shape:
        raise ValueError(f"{name} is {tuple(y.shape)} and x {tuple(x.shape)}. Give one for each symbol.")


def _targets(y: Tensor, x: Tensor) -> Tensor:
    """y as whole numbers that can be negative: bytes cannot."""
    _require_alike("y", y, x)
    if y.is_floating_point():
        raise ValueError(f"y is {y.dtype}. Give symbols, or -1 where nothing follows.")
    return y.long()
