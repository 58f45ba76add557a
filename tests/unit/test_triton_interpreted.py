"""The kernels in Triton against float64 on a CPU, by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_agree_with_the_reference() -> None:
    # A process of its own: Triton settles at its import whether it interprets, and tests/gpu wants it not to.
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parents[1] / "interpreted.py"
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    kinds = {
        "op": 3e-2,
        "model": 5e-2,
        "eight": 0.3,
        "optimiser": 1e-5,
        "masks": 1e-6,
    }  # in bf16, in fp32; all others in fp16
    limits = {name: kinds.get(name.split()[0], 2e-3) for name in errors}
    assert {name: error for name, error in errors.items() if not error < limits[name]} == {}
