"""Keeps what is made of parameters until one of them changes: a thousand steps, one weight normalisation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, Self, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


class Kept(Generic[T]):
    """One value and the parameters it was made of.

    A change in place is seen by the parameter's version, a new tensor by its address. Fused optimisers
    leave the version as it was, so a new gradient counts as a change too, and modules `forget` whenever
    they run with gradients. What goes past autograd altogether (`.data`, the replay of a CUDA graph) is
    not seen: then call `forget`.
    """

    def __init__(self) -> None:
        self._kept: tuple[Any, Any, T] | None = None

    def get(self, parameters: list[Tensor], how: Hashable, make: Callable[[], T]) -> T:
        """The value kept, if made in this way of these parameters as they are now; else a new one."""
        if any(p.is_inference() for p in parameters):  # they have no version
            return make()
        mark = (how, [(id(p), p._version, p.data_ptr(), _mark(p.grad)) for p in parameters])
        if self._kept is None or self._kept[0] != mark:
            # The storages are held on to, so that no other tensor can come to live at their addresses.
            self._kept = (mark, [(p, p.detach()) for p in parameters], make())
        return self._kept[2]

    def forget(self) -> None:
        """Drops the value."""
        self._kept = None

    def __deepcopy__(self, memo: Any) -> Kept[T]:
        return Kept()

    def __reduce__(self) -> tuple[type[Kept[T]], tuple[()]]:
        return Kept, ()


class Keeping(nn.Module):
    """A module with values kept for evaluation, which forgets them when its mode, type or device changes."""

    def forget(self) -> None:
        """Drops what is kept of the parameters. Needed only after they were changed behind autograd's back:
        through `.data`, or by the replay of a CUDA graph."""
        for value in vars(self).values():
            if isinstance(value, Kept):
                value.forget()

    def train(self, mode: bool = True) -> Self:
        self.forget()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.forget()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]


def parameters_of(module: nn.Module, layers: Iterable[nn.Module]) -> list[Tensor]:
    """Those of a module and of its layers: what module.parameters() gives, ten times as fast."""
    found: list[Tensor] = [p for p in module._parameters.values() if p is not None]
    for layer in layers:
        found += [p for p in layer._parameters.values() if p is not None]
    return found


def _mark(gradient: Tensor | None) -> tuple[int, int] | None:
    if gradient is None or gradient.is_inference():
        return None
    return id(gradient), gradient._version
