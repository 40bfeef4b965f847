#!/bin/sh
# transformers: a model read from a GGUF loses the scaling of its positions: YaRN, linear, and that of Llama 3.1.
#
# Guess before running: transformers has all of these scalings, and a GGUF says which: `rope.scaling.type` and its
#   factor, or for Llama 3.1 a tensor `rope_freqs.weight`, by which frequencies are divided. So a GGUF of FP32 weights
#   gives the logits that the original gives.
# Seen: the weights are equal to the bit, and the configuration says "default" in place of each of the three. Nothing
#   is said of it at the usual level of messages. The scaling of Llama 3.1, which all models of 3.1, 3.2 and 3.3 have,
#   spares near tokens, so that the loss grows with the text: at 2048 tokens, a fraction of what such a model reads,
#   29 % of the most likely tokens are others. YaRN and linear scaling change every distance, and a third to two
#   thirds are others from the beginning. Without scaling the logits are equal. So a GGUF of such a model loses in
#   F32 as well when transformers reads it, and what is measured as the loss of a type is that of the positions.
#
# Packages: transformers 5.17.0 with torch 2.13.0, gguf 0.19.0 (writes the files, with the keys that llama.cpp
#   writes). Models of two layers with weights by chance and the scalings that Llama 3.1, DeepSeek Coder and Qwen3
#   publish; only the order of the losses says something of real ones.
# Output seen (KL to the original and other most likely tokens, of the first 256 tokens and of the last 256 of 2048):
#   Llama default: read as default, 0.000 and 0 %, 0.000 and 0 %
#   Qwen3 default: read as default, 0.000 and 0 %, 0.000 and 0 %
#   Llama llama3: read as default, 0.000 and 5 %, 0.038 and 29 %
#   Llama linear: read as default, 0.197 and 66 %, 0.130 and 66 %
#   Qwen3 yarn: read as default, 0.038 and 40 %, 0.058 and 36 %
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.17.0 accelerate==1.15.0 \
  gguf==0.19.0
cat > "$here/rope.py" <<'PYTHON'
import sys
from pathlib import Path

import gguf
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

torch.set_num_threads(1)
here, V, D, LAYERS, HEADS = Path(sys.argv[1]), 64, 128, 2, 2
SIZES = {"vocab_size": V, "hidden_size": D, "intermediate_size": D, "num_hidden_layers": LAYERS, "head_dim": D}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "tie_word_embeddings": False}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
kinds = gguf.RopeScalingType


def build(config):
    """The model that was published, with weights by chance."""
    torch.manual_seed(0)
    model = (LlamaForCausalLM if config.model_type == "llama" else Qwen3ForCausalLM)(config).eval()
    for each in model.parameters():
        if each.ndim == 2:
            torch.nn.init.normal_(each, std=each.shape[1] ** -0.5)
    return model


def write(model, theta, scaling):
    """Its GGUF in FP32, with the keys and orders of llama.cpp's converter."""
    kind = model.config.model_type
    file = gguf.GGUFWriter(here / "x.gguf", kind)
    file.add_context_length(model.config.max_position_embeddings)
    file.add_embedding_length(D)
    file.add_feed_forward_length(D)
    file.add_block_count(LAYERS)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_key_length(D)
    file.add_value_length(D)
    file.add_rope_dimension_count(D)
    file.add_rope_freq_base(theta)
    file.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    file.add_vocab_size(V)
    file.add_tokenizer_model("gpt2")
    file.add_token_list([f"t{each}" for each in range(V)])
    if scaling["rope_type"] in ("linear", "yarn"):
        file.add_rope_scaling_type(kinds.YARN if scaling["rope_type"] == "yarn" else kinds.LINEAR)
        file.add_rope_scaling_factor(scaling["factor"])
    if scaling["rope_type"] == "yarn":
        file.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if scaling["rope_type"] == "llama3":
        plain = theta ** (-torch.arange(0, D, 2) / D)
        file.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], LAYERS)
    for name, tensor in model.state_dict().items():
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):  # pairs of neighbours
            tensor = tensor.reshape(HEADS, 2, D // 2, D).transpose(1, 2).reshape(-1, D)
        file.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy())
    for step in (file.write_header_to_file, file.write_kv_data_to_file, file.write_tensors_to_file, file.close):
        step()


@torch.no_grad()
def compare(model, other):
    """KL and share of other most likely tokens, of the first and the last 256."""
    tokens = torch.randint(V, (1, 2048), generator=torch.Generator().manual_seed(1))
    p, q = (each(tokens).logits[0].double().log_softmax(-1) for each in (model, other))
    kl, differ = (p.exp() * (p - q)).sum(-1), (p.argmax(-1) != q.argmax(-1)).double()
    return [(kl[part].mean().item(), 100 * differ[part].mean().item()) for part in (slice(256), slice(-256, None))]


for family, theta, scaling in (
    ("Llama", 1e4, {"rope_type": "default"}),
    ("Qwen3", 1e6, {"rope_type": "default"}),
    ("Llama", 5e5, {"rope_type": "llama3", **LLAMA3}),
    ("Llama", 1e5, {"rope_type": "linear", "factor": 4.0}),
    ("Qwen3", 1e6, {"rope_type": "yarn", **YARN}),
):
    config = (LlamaConfig if family == "Llama" else Qwen3Config)(**SIZES, max_position_embeddings=131072)
    config.rope_parameters = {"rope_theta": theta, **scaling}
    model = build(config)
    write(model, theta, scaling)
    other = AutoModelForCausalLM.from_pretrained(here, gguf_file="x.gguf").eval()
    state = other.state_dict()
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    read, (first, last) = other.config.rope_parameters["rope_type"], compare(model, other)
    shown = "{:.3f} and {:.0f} %"
    print(f"{family} {scaling['rope_type']}: read as {read}, {shown.format(*first)}, {shown.format(*last)}", flush=True)
    assert read == "default"
    if scaling["rope_type"] == "default":
        assert max(first + last) < 1e-6
    else:
        assert last[0] > 0.02 and last[1] > 20
PYTHON
"$here/venv/bin/python" -W ignore "$here/rope.py" "$here" 2> "$here/said" || (cat "$here/said" && exit 1)
if grep -i rope "$here/said"; then exit 1; fi  # something is said of it now
echo "as stated"
