#!/bin/sh
# transformers: a list that keeps layer 1 unquantized keeps layers 10 and 11 too, and quantizes the head.
#
# Guess before running: `modules_to_not_convert=["model.layers.1"]` keeps the linears of layer 1 beside what is
#   kept without a list, the head, and quantizes the other eleven layers, with quanto, bitsandbytes and torchao
#   alike; "gate_proj" keeps that linear of every layer, with all three or with none.
# Seen: a name is a regular expression that the beginning of a module's name has to match, so that 1 is 10 and
#   11 as well, and a point at the end, which is any letter, changes nothing; a backslash before it does. Of 36
#   layers, 1 stands for eleven, 3 for seven and 4 for one. An end of a name counts with quanto and bitsandbytes
#   and not with torchao. Any list takes the place of the head's exception. Nothing is said of it. So who keeps
#   one layer after the other, to see which of them is sensitive, finds the early ones important, and compares
#   them with a model whose head has other bits.
#
# Packages: transformers 5.17.0, optimum-quanto 0.2.7, bitsandbytes 0.50.2, torchao 0.18.0 with torch 2.13.0.
# Output seen (layers of 12 whose `gate_proj` is not quantized):
#   no list: quanto none and the head, bitsandbytes none and the head, torchao none and the head
#   model.layers.1: quanto 1 10 11, bitsandbytes 1 10 11, torchao 1 10 11
#   model.layers.1.: quanto 1 10 11, bitsandbytes 1 10 11, torchao 1 10 11
#   model.layers.1\.: quanto 1, bitsandbytes 1, torchao 1
#   model.layers.2: quanto 2, bitsandbytes 2, torchao 2
#   layers.1: quanto none, bitsandbytes none, torchao none
#   gate_proj: quanto all, bitsandbytes all, torchao none
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.17.0 accelerate==1.15.0 ninja
"$here/venv/bin/python" -m pip install --quiet --no-deps optimum-quanto==0.2.7 bitsandbytes==0.50.2 torchao==0.18.0
cat > "$here/kept.py" <<'PYTHON'
import sys
from pathlib import Path

import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    QuantoConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    TorchAoConfig,
)

torch.manual_seed(0)
torch.set_num_threads(1)
LAYERS, folder = 12, Path(sys.argv[1]) / "model"
sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
heads = {"num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2}
Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=False)).save_pretrained(folder)
libraries = {
    "quanto": lambda keep: QuantoConfig(weights="int8", modules_to_not_convert=keep),
    "bitsandbytes": lambda keep: BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=keep),
    "torchao": lambda keep: TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=keep),
}


def is_kept(layer):
    return type(layer) is torch.nn.Linear and type(layer.weight) is torch.nn.Parameter


def kept(library, names):
    """Layers whose `gate_proj` is a plain linear, and whether the head is one."""
    options = {"quantization_config": libraries[library](names), "dtype": torch.float32, "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    return [i for i in range(LAYERS) if is_kept(model.model.layers[i].mlp.gate_proj)], is_kept(model.lm_head)


names_of_layers = "model.layers.1", "model.layers.1.", r"model.layers.1\.", "model.layers.2", "layers.1", "gate_proj"
for names in (None, *([each] for each in names_of_layers)):
    said = []
    for library in libraries:
        layers, head = kept(library, names)
        shown = {0: "none", LAYERS: "all"}.get(len(layers), " ".join(map(str, layers)))
        said.append(f"{library} {shown}{' and the head' if head else ''}")
    print(f"{names[0] if names else 'no list'}:", ", ".join(said), flush=True)
PYTHON
"$here/venv/bin/python" -W ignore "$here/kept.py" "$here" > "$here/seen" 2> "$here/said" || (cat "$here/said" && exit 1)
cat "$here/seen"
sed -n '/^# Output seen/,/^set/s/^#   //p' "$0" | diff - "$here/seen"
echo "as stated"
