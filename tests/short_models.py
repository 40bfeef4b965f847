"""The bundled models with two of their layers: trained weights at a third or half of the time."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

MODELS = Path(__file__).parents[1] / "examples" / "models"
Shorten = Callable[[str], Path]

LAYER = re.compile(r"(?<!mtp\.)\blayers\.(\d+)\.")


def shortened(name: str, folder: Path) -> Path:
    """Write a bundled model with one layer of each kind, or the first two of the only kind."""
    shutil.copytree(MODELS / name, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    kinds: Sequence[str] = text["layer_types"]
    kept = [0, kinds.index("full_attention") or 1]
    text |= {"num_hidden_layers": 2, "layer_types": [kinds[layer] for layer in kept]}
    if "full_attention_interval" in text:
        text["full_attention_interval"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for tensor, weight in load_file(folder / "model.safetensors").items():
        found = LAYER.search(tensor)
        if found is None:
            tensors[tensor] = weight
        elif int(found[1]) in kept:
            layer = kept.index(int(found[1]))
            tensors[tensor[: found.start(1)] + str(layer) + tensor[found.end(1) :]] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
