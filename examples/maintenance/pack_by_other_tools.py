"""Pack a small random Qwen3 or Qwen3.5 by llm-compressor or AutoRound, for tests/data/others.

All linears are targeted, as a user does who names no list: the head stays, `in_proj_a` and
`in_proj_b` are packed. Run in an environment of the tool:

    python pack_by_other_tools.py llmcompressor qwen3.5 OUT
    python pack_by_other_tools.py auto-round qwen3 OUT

`--expect` then writes expected.bin beside the weights: for llm-compressor in lowbit's environment,
since its own transformers 5.17 computes a Qwen3.5 in BF16 whatever is asked.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
IDS = [5, 17, 200, 3, 3, 250, 1]
SIZES = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 260,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 32,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [],
}


def write_original(kind: str, folder: Path) -> None:
    """Save a random model as transformers does; a Qwen3.5 with the head for drafts beside it."""
    import transformers

    torch.manual_seed(0)
    if kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    else:
        config = transformers.Qwen3_5Config(
            text_config=SIZES | DELTA, vision_config=VISION, tie_word_embeddings=True
        )
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    model.bfloat16().save_pretrained(folder)
    if kind == "qwen3.5":
        tensors = load_file(folder / "model.safetensors")
        layer = "model.language_model.layers.1."
        tensors |= {
            f"mtp.layers.0.{name.removeprefix(layer)}": tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(layer)
        }
        tensors["mtp.fc.weight"] = torch.randn(64, 128).mul(0.05).bfloat16()
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            tensors[f"mtp.{norm}.weight"] = torch.zeros(64).bfloat16()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        path = folder / "config.json"  # transformers leaves the head's keys out
        content = json.loads(path.read_text())
        content["text_config"] |= {key: DELTA[key] for key in DELTA if key.startswith("mtp")}
        path.write_text(json.dumps(content))


def by_llmcompressor(source: Path, out: Path) -> None:
    import transformers
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    kind = json.loads((source / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, kind).from_pretrained(source, dtype="auto")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | {"group_size": GROUP}}}
    recipe = QuantizationModifier(config_groups=groups, ignore=["lm_head", "re:.*visual.*"])
    oneshot(model=model, recipe=recipe)
    model.save_pretrained(out, save_compressed=True)


def by_auto_round(source: Path, out: Path, layout: str) -> None:
    from auto_round import AutoRound

    rounding = AutoRound(
        str(source), tokenizer=None, bits=4, group_size=GROUP, iters=0, disable_opt_rtn=True
    )
    rounding.quantize_and_save(str(out), format=layout)


def write_expected(folder: Path) -> None:
    """Save the logits that transformers computes from a packed folder; AutoRound's are of F16."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0]
    save_file({"ids": torch.tensor(IDS), "logits": logits}, folder / "expected.bin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=["llmcompressor", "auto-round"])
    parser.add_argument("model", choices=["qwen3", "qwen3.5"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layout", default="auto_round", help="of AutoRound")
    parser.add_argument("--expect", action="store_true", help="read OUT by transformers alone")
    options = parser.parse_args()
    if options.expect:
        write_expected(options.out)
        return
    source = options.out.with_name(options.out.name + "-original")
    write_original(options.model, source)
    if options.tool == "llmcompressor":
        by_llmcompressor(source, options.out)
    else:
        by_auto_round(source, options.out, options.layout)


if __name__ == "__main__":
    main()
