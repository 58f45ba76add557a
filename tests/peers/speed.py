"""Times representations against jax-unirep: the same proteins, one after the other, in one run.

python tests/peers/speed.py SIZE [RECORDS]: prints one JSON object. MULSTM_PEERS names the peers' environment.
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

import numpy as np
import torch

from mulstm import interop
from mulstm.checkpoint import Checkpoint
from mulstm.embedding import embed
from mulstm.interop import unirep
from mulstm.recipe import Recipe

ASK = Path(__file__).parent / "ask.py"


def proteins(count: int) -> list[str]:
    """Made up, of 30 to 1,200 residues, with the frequencies of a protein."""
    dice = random.Random(1)
    letters, weights = "ACDEFGHIKLMNPQRSTVWY", [8, 1, 5, 7, 4, 7, 2, 6, 6, 10, 2, 4, 5, 4, 5, 7, 5, 7, 1, 3]
    return ["".join(dice.choices(letters, weights, k=dice.randint(30, 1200))) for _ in range(count)]


def theirs(python: str, size: int, texts: list[str]) -> tuple[float, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "q.json", Path(folder) / "a.npz"
        question.write_text(json.dumps({"size": size, "proteins": texts}))
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [python, str(ASK), "representations", str(question), str(answer)]
        subprocess.run(command, check=True, env=environment)
        with np.load(answer) as found:
            return float(found["seconds"]), found["h_mean"]


def main() -> None:
    size, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 300
    python = str(Path(os.environ["MULSTM_PEERS"]) / "bin" / "python")
    folder = subprocess.run([python, str(ASK), "weights_folder"], capture_output=True, text=True, check=True)
    weights = unirep.read(Path(folder.stdout.strip()) / f"{size}_weights" / "model_weights.npz")
    loaded = Checkpoint(interop.to_model(weights), weights.alphabet, Recipe(), {"source": weights.source})
    texts = proteins(count)
    residues = sum(map(len, texts))
    began = time.perf_counter()
    ours = embed(loaded, texts)
    seconds = time.perf_counter() - began
    their_seconds, h_mean = theirs(python, size, texts)
    print(
        json.dumps(
            {
                "size": size,
                "records": count,
                "residues": residues,
                "threads": torch.get_num_threads(),
                "mulstm_residues_per_second": round(residues / seconds, 1),
                "jax_unirep_residues_per_second": round(residues / their_seconds, 1),
                "ratio": round(their_seconds / seconds, 2),
                "largest_difference": float(np.abs(ours.h_mean - h_mean).max()),
            }
        )
    )


if __name__ == "__main__":
    main()
