"""The bundled models with two of their layers and a quarter of their tokens.

Trained weights, at a third of the time: the head of a whole one takes as long as three layers.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

MODELS = Path(__file__).parents[1] / "examples" / "models"
Shorten = Callable[..., Path]

WHOLE_VOCABULARY = 4096
SHORT_VOCABULARY = 1024  # tokens that are kept: the bytes, the first merges, the special ones
LAYER = re.compile(r"(?<!mtp\.)\blayers\.(\d+)\.")


def shortened(name: str, folder: Path, tokens: int = SHORT_VOCABULARY) -> Path:
    """Write a bundled model with one layer of each kind, or the first two of the only kind.

    Of a larger vocabulary so many tokens are kept.
    """
    shutil.copytree(MODELS / name, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    kinds: Sequence[str] = text["layer_types"]
    kept = [0, kinds.index("full_attention") or 1]
    text |= {"num_hidden_layers": 2, "layer_types": [kinds[layer] for layer in kept]}
    if "full_attention_interval" in text:
        text["full_attention_interval"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    kept_ids = _cut_vocabulary(folder, text["vocab_size"], tokens)
    tensors = {}
    for tensor, weight in load_file(folder / "model.safetensors").items():
        found = LAYER.search(tensor)
        if tensor.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensors[tensor] = weight[kept_ids]
        elif found is None:
            tensors[tensor] = weight
        elif int(found[1]) in kept:
            layer = kept.index(int(found[1]))
            tensors[tensor[: found.start(1)] + str(layer) + tensor[found.end(1) :]] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _cut_vocabulary(folder: Path, size: int, tokens: int) -> list[int]:
    """Ids of the tokens that are kept: the first ones, and the special ones, which come last."""
    if size <= tokens:
        return list(range(size))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    specials = [token["id"] for token in tokenizer["added_tokens"]]
    first = tokens - len(specials)
    new = {before: first + place for place, before in enumerate(specials)}
    for token in tokenizer["added_tokens"]:
        token["id"] = new[token["id"]]
    model = tokenizer["model"]
    vocabulary = {token: id for token, id in model["vocab"].items() if id < first}
    merges = [parts for parts in model["merges"] if {*parts, "".join(parts)} <= vocabulary.keys()]
    model |= {"vocab": vocabulary, "merges": merges}
    path.write_text(json.dumps(tokenizer))
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(_with_ids(settings, tokens, new)))
    return [*range(first), *specials]


def _with_ids(settings: dict[str, Any], tokens: int, new: dict[int, int]) -> dict[str, Any]:
    """Settings of a vocabulary of so many tokens, with the new ids of special ones."""
    found = dict(settings)
    for key, value in settings.items():
        if isinstance(value, dict):
            found[key] = _with_ids(value, tokens, new)
        elif key == "vocab_size":
            found[key] = tokens
        elif key.endswith("token_id") and value is not None:
            ids = [new.get(id, id) for id in (value if isinstance(value, list) else [value])]
            found[key] = ids if isinstance(value, list) else ids[0]
    return found
