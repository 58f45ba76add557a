"""Whether machine code made on the spot can run here; where it cannot, PyTorch's own calls do the work."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mulstm.ops.vector import Place


@functools.cache
def unavailable() -> str | None:
    """None, or why not: tried, not guessed."""
    try:
        vector = importlib.import_module("mulstm.ops.vector")

        def formula(at: Place) -> None:
            at.put("y", vector.sigmoid(at.get("x")))

        kernel = vector.kernel(formula, {"x": vector.Operand(), "y": vector.Operand()})
        x = torch.tensor([-1e4, -1.0, 0.0, 1.0] * 9, dtype=torch.float32, device="cpu")
        y = torch.empty_like(x)
        kernel(1, 1, 36, x.data_ptr(), y.data_ptr())
        if not torch.allclose(y, torch.sigmoid(x), rtol=1e-6, atol=0):
            return "its sigmoid is wrong on this CPU"
    except ImportError as fault:
        return f"llvmlite cannot be imported ({fault})"
    except Exception as fault:  # whatever a compiler may object to on a CPU that we have not seen
        return f"its code cannot be made here ({fault})"
    return None


def products() -> Any:
    """The module of the products, for those who have asked first."""
    return importlib.import_module("mulstm.ops.vector_product")
