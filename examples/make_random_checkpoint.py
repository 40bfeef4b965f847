"""Write a random BF16 Qwen3 checkpoint in a real model's shapes, to measure speed and memory with.

python examples/make_random_checkpoint.py 1.7B /tmp/qwen3-1.7b-random
lowbit-convert /tmp/qwen3-1.7b-random /tmp/qwen3-1.7b-int4
lowbit-run bench /tmp/qwen3-1.7b-int4
"""

import json
from pathlib import Path

import click
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lowbit.formats.architectures import is_tied, tensor_table
from lowbit.formats.shards import index_json, lay_out

# hidden_size, intermediate_size, layers, query heads, key/value heads, head tied to the embedding
SIZES = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
}
TOKENS = 151643  # before the special ones
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
POOL = 1 << 26  # random numbers drawn once; every tensor takes a stretch of them


def config_of(size: str) -> dict[str, object]:
    """config.json of a size."""
    hidden, inner, layers, heads, kv_heads, tied = SIZES[size]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }


def tokenizer() -> Tokenizer:
    """As many tokens as Qwen3's: the bytes, and fillers that no text becomes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"<{number}>" for number in range(len(alphabet), TOKENS))]
    made = Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return made


@click.command()
@click.argument("size", type=click.Choice(list(SIZES)))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True)
def main(size: str, out: Path, seed: int) -> None:
    """Write a random checkpoint of SIZE to the folder OUT."""
    config = config_of(size)
    generator = torch.Generator().manual_seed(seed)
    pool = (torch.randn(POOL, generator=generator) * 0.02).to(torch.bfloat16)
    tensors = [
        (spec.name, torch.bfloat16, spec.shape)
        for spec in tensor_table(config)
        if not (is_tied(config) and spec.role == "head")
    ]
    out.mkdir(parents=True)
    shards = lay_out(tensors, 4_000_000_000)
    for shard in shards:
        with (out / shard.file).open("wb") as file:
            file.write(shard.header)
            for number, info in enumerate(shard.tensors):
                left = info.nbytes // 2
                start = number * 7919 % POOL
                while left:
                    part = pool[start : start + left]
                    file.write(part.view(torch.uint8).numpy().data)
                    left -= len(part)
                    start = 0
    (out / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer().save(str(out / "tokenizer.json"))
    if len(shards) > 1:
        (out / "model.safetensors.index.json").write_text(json.dumps(index_json(shards)))
    click.echo(f"{out}: {sum(shard.size for shard in shards) / 1e9:.2f} GB in {len(shards)} files")


if __name__ == "__main__":
    main()
