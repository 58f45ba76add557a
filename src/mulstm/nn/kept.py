"""Keeps what is made of parameters until one of them changes: a thousand steps, one weight normalisation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mulstm.ops import modes

if TYPE_CHECKING:
    from mulstm.nn.layer import Layer

T = TypeVar("T")
_steps = 0  # of all optimisers in this process


def _count(optimiser: torch.optim.Optimizer, *_: Any) -> None:
    global _steps
    _steps += 1
    if torch.compiler.is_compiling():
        return
    # A fused step leaves versions as they were; others may hold these very tensors, and frozen.
    fused = [p for group in optimiser.param_groups if group.get("fused") for p in group["params"]]
    changed = [p for p in fused if p.grad is not None and not p.is_inference()]
    torch.autograd.graph.increment_version(changed)


register_optimizer_step_post_hook(_count)


class Kept(Generic[T]):
    """One value and the parameters it was made of.

    A change in place is seen by the parameter's version, a new tensor by its address. Other people's fused
    optimisers may leave the version as it was, so a step of any optimiser counts as a change too, unless all
    parameters are frozen; and modules `forget` whenever they run with gradients. What goes past autograd
    altogether (`.data`, also of a tensor tied through it, memory shared with NumPy, a fused kernel called by
    itself, a collective of torch.distributed, the replay of a CUDA graph) is not seen: then call `forget`.
    """

    def __init__(self) -> None:
        self._kept: tuple[Any, Any, T] | None = None

    def get(self, parameters: list[Tensor], how: Hashable, make: Callable[[], T]) -> T:
        """The value kept, if made in this way of these parameters as they are now; else a new one.

        Without parameters, or with those of inference mode, which have no version, it is always new; and so
        it is where other processes or tensors may write to them.
        """
        if not parameters or True in [p.is_inference() for p in parameters]:
            return make()
        steps = _steps if True in [p.requires_grad for p in parameters] else None
        mark = (how, steps, [(id(p), p._version, p.data_ptr()) for p in parameters])
        kept = self._kept  # another thread may forget it at any moment
        if kept is None or kept[0] != mark:
            # The storages are held on to, so that no other tensor can come to live at their addresses.
            kept = (mark, [(p, p.detach()) for p in parameters], make())
            if not any(_is_shared(p) for p in parameters):
                self._kept = kept
        return kept[2]

    def forget(self) -> None:
        """Drops the value."""
        self._kept = None

    def __deepcopy__(self, memo: Any) -> Kept[T]:
        return Kept()

    def __reduce__(self) -> tuple[type[Kept[T]], tuple[()]]:
        return Kept, ()


def _is_shared(p: Tensor) -> bool:
    """With a larger tensor, of which all parameters may be views; or with other processes, which a GPU's
    tensors all say of themselves."""
    if p.untyped_storage().nbytes() > p.nbytes:
        return True
    return p.device.type == "cpu" and bool(p.is_shared())  # type: ignore[no-untyped-call]


class Keeping(nn.Module):
    """A module of layers with values kept for evaluation, forgotten when its mode, type or device changes."""

    @property
    def stack(self) -> list[Layer]:
        """The layers, lowest first; of two directions the forward one first."""
        # Asked several times a step: list(self.layers) takes five times as long.
        return cast("list[Layer]", list(self._modules["layers"]._modules.values()))  # type: ignore[union-attr]

    def forget(self) -> None:
        """Drops what is kept of the parameters. Needed only after they were changed behind autograd's back:
        through `.data` or NumPy, by a collective of torch.distributed, or by the replay of a CUDA graph."""
        for value in vars(self).values():
            if isinstance(value, Kept):
                value.forget()

    def keeps_or_forgets(self) -> bool:
        """Whether what is made now may be kept. With gradients an update may follow, so it is forgotten."""
        if not self.training and not torch.is_grad_enabled():
            return not torch.compiler.is_compiling() and modes.objection() is None
        if not torch.compiler.is_compiling():
            self.forget()
        return False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """In evaluation while it lasts, then in the mode that it was in."""
        was = self.training
        if was:
            self.eval()
        try:
            yield
        finally:
            if was:
                self.train()

    def train(self, mode: bool = True) -> Self:
        self.forget()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.forget()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]


def parameters_of(module: Keeping) -> list[Tensor]:
    """Those of a module and of its layers: what module.parameters() gives, ten times as fast.

    An empty list, so that nothing is kept, where a parametrization or a hook, pruning for one, makes them of
    what may change unseen, or where a layer is wrapped, by torch.compile for one; replicas of DataParallel
    have none either.
    """
    found: list[Tensor] = []
    for part in (module, *module.stack):
        # A plain layer has no modules in it.
        made = "parametrizations" in part._modules if part is module else part._modules
        if part._forward_pre_hooks or made:
            return []
        found += [p for p in part._parameters.values() if p is not None]
    return found
