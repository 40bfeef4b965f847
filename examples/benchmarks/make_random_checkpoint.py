"""Write a random BF16 checkpoint in a real model's shapes, to measure speed and memory with.

python examples/benchmarks/make_random_checkpoint.py 1.7B random-1.7b
lowbit-convert random-1.7b random-1.7b-int4
lowbit-run bench random-1.7b-int4

With `--packed int4` it is a packed one of random codes and scales, which takes seconds; its head
has codes of its own, as that of a tied model has behind `lowbit-convert`.

Sizes: Qwen3 as `1.7B`, Qwen3.5 as `3.5-2B` (no MTP head; a BF16 vision tower with `--tower`),
mixtures of experts as `30B-A3B`, `3.5-35B-A3B` and `3.5-122B-A10B`; `--layers 4` writes the first
layers alone.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lowbit.convert.texts.calibration import bundled_texts
from lowbit.convert.texts.evaluation import default_texts
from lowbit.formats.architectures import is_tied, read_vision, tensor_table, untied
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.architectures.vision import vision_shapes
from lowbit.formats.image_settings import OWN_FILE
from lowbit.formats.layout.packing import PACKED, SHAPE, packed_shapes
from lowbit.formats.layout.quantization_config import write_quantization_config
from lowbit.formats.layout.recipes import BITS_BY_ROLE, Base, base_schemes
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.shards import Shard, index_json, lay_out

# hidden_size, intermediate_size, layers, query heads, key/value heads, head tied to the embedding
SIZES = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
    "30B-A3B": (2048, 6144, 48, 32, 4, False),
}
# the same with the value heads of a linear layer before the last
HYBRID_SIZES = {
    "3.5-0.8B": (1024, 3584, 24, 8, 2, 16, True),
    "3.5-2B": (2048, 6144, 24, 8, 2, 16, True),
    "3.5-4B": (2560, 9216, 32, 16, 4, 32, True),
    "3.5-9B": (4096, 12288, 32, 16, 4, 32, False),
    "3.5-27B": (5120, 17408, 64, 24, 4, 48, False),
    "3.5-35B-A3B": (2048, 512, 40, 16, 2, 32, False),
    "3.5-122B-A10B": (3072, 1024, 48, 32, 2, 64, False),
}
# experts, width of one, width of the shared one
EXPERTS = {
    "30B-A3B": (128, 768, None),
    "3.5-35B-A3B": (256, 512, 512),
    "3.5-122B-A10B": (256, 1024, 1024),
}
# width, width of the MLP, layers and heads of a vision tower
TOWERS = {
    "3.5-0.8B": (768, 3072, 12, 12),
    "3.5-2B": (1024, 4096, 24, 16),
    "3.5-4B": (1024, 4096, 24, 16),
    "3.5-9B": (1152, 4304, 27, 16),
    "3.5-27B": (1152, 4304, 27, 16),
    "3.5-35B-A3B": (1152, 4304, 27, 16),
    "3.5-122B-A10B": (1152, 4304, 27, 16),
}
IMAGES = {  # as in the folders of Qwen3.5
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
VISUAL = "model.visual."
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SEEING_SPECIALS = (
    *SPECIALS,
    *(f"<|{name}_{end}|>" for name in ("object_ref", "box", "quad") for end in ("start", "end")),
    *(f"<|{name}|>" for name in ("vision_start", "vision_end", "vision_pad")),
    *("<|image_pad|>", "<|video_pad|>"),
)
FIRST_SPECIAL = {"qwen3": 151643, "qwen3_5": 248044}  # id of the first special token
# Words that Qwen's tokenizer cuts a text into
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRAINED = 11_000  # tokens with which bundled texts have as many as by Qwen's
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
POOL = 1 << 26  # random numbers drawn once; every tensor takes a stretch of them
WRITERS = 8  # threads, each with a shard: one copies some 2 GB a second into the system's cache


def config_of(size: str) -> dict[str, Any]:
    """config.json of a size."""
    config = dense_config_of(size)
    if size not in EXPERTS:
        return config
    count, inner, shared = EXPERTS[size]
    changes = {
        "num_experts": count,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": inner,
        "mlp_only_layers": [],
    }
    if shared is None:
        names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        return config | names | changes | {"decoder_sparse_step": 1, "norm_topk_prob": True}
    names = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    return config | names | changes | {"shared_expert_intermediate_size": shared}


def dense_config_of(size: str) -> dict[str, Any]:
    """config.json of a size, with an MLP in place of experts."""
    if size in HYBRID_SIZES:
        return hybrid_config_of(size)
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


def hybrid_config_of(size: str) -> dict[str, Any]:
    """config.json of a Qwen3.5 text model."""
    hidden, inner, layers, heads, kv_heads, value_heads, tied = HYBRID_SIZES[size]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": 248320,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": tied,
        "eos_token_id": 248044,
    }


def seeing_config_of(size: str) -> dict[str, Any]:
    """config.json of a Qwen3.5 with its vision tower."""
    text = config_of(size)
    [name], kind = text.pop("architectures"), text["model_type"]
    text["rope_parameters"] |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    width, inner, layers, heads = TOWERS[size]
    first = FIRST_SPECIAL["qwen3_5"]
    return {
        "architectures": [name.replace("CausalLM", "ConditionalGeneration")],
        "model_type": kind.removesuffix("_text"),
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": first + SEEING_SPECIALS.index("<|image_pad|>"),
        "video_token_id": first + SEEING_SPECIALS.index("<|video_pad|>"),
        "vision_start_token_id": first + SEEING_SPECIALS.index("<|vision_start|>"),
        "vision_end_token_id": first + SEEING_SPECIALS.index("<|vision_end|>"),
        "text_config": text,
        "vision_config": {
            "model_type": kind.removesuffix("_text"),
            "depth": layers,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_heads": heads,
            "in_channels": 3,
            "patch_size": IMAGES["patch_size"],
            "temporal_patch_size": IMAGES["temporal_patch_size"],
            "spatial_merge_size": IMAGES["merge_size"],
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 2304,
            "hidden_act": "gelu_pytorch_tanh",
            "deepstack_visual_indexes": [],
        },
    }


def tokenizer(tokens: int, specials: Sequence[str] = SPECIALS) -> Tokenizer:
    """Tokens as long as Qwen's in bundled texts, and fillers that no text becomes.

    Args:
        tokens: before the special tokens.
    """
    words = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = words
    texts = [*bundled_texts(), *(text.content for text in default_texts())]
    trainer = trainers.BpeTrainer(
        vocab_size=min(TRAINED, tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    learned = json.loads(trained.to_str())["model"]
    vocabulary = learned["vocab"]
    fillers = {f"<{id}>": id for id in range(len(vocabulary), tokens)}
    made = Tokenizer(models.BPE(vocabulary | fillers, list(map(tuple, learned["merges"]))))
    made.pre_tokenizer = words
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return made


Entry = tuple[str, torch.dtype, tuple[int, ...]]


@click.command()
@click.argument("size", type=click.Choice([*SIZES, *HYBRID_SIZES]))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Layers, where fewer than the real ones.")
@click.option("--packed", type=click.Choice(list(BITS_BY_ROLE)), help="Codes of a recipe.")
@click.option("--tower", is_flag=True, help="With a vision tower, in BF16; of a Qwen3.5.")
@click.option(
    "--tokenizer",
    "tokens",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder whose tokenizer and template are taken; else one is trained in a second.",
)
def main(
    size: str,
    out: Path,
    seed: int,
    layers: int | None,
    packed: Base | None,
    tower: bool,
    tokens: Path | None,
) -> None:
    """Write a random checkpoint of SIZE to the folder OUT."""
    if tower and size not in TOWERS:
        raise click.UsageError(f"--tower: {size} has none; {', '.join(TOWERS)} have one")
    config = seeing_config_of(size) if tower else config_of(size)
    if layers is not None:
        config.get("text_config", config)["num_hidden_layers"] = layers
    written = write(config, out, seed, packed, tokens)
    click.echo(f"{out}: {written / 1e9:.2f} GB")


def write(
    config: dict[str, Any],
    out: Path,
    seed: int = 0,
    packed: Base | None = None,
    tokens: Path | None = None,
) -> int:
    """Write a random checkpoint of a config to a new folder; bytes of its shards.

    The head of a packed one has codes of its own, as `lowbit-convert` writes that of a tied model.

    Args:
        config: content of its config.json.
        out: the folder.
        seed: of its numbers.
        packed: recipe whose codes and scales it has; None for BF16.
        tokens: see `write_files`.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = (torch.randn(POOL, generator=generator) * 0.02).to(torch.bfloat16).view(torch.uint8)
    words = torch.randint(256, (2 * POOL,), generator=generator, dtype=torch.uint8)
    if packed is not None:
        config = untied(config)
    table = tensor_table(config)
    specs = [spec for spec in table if not (is_tied(config) and spec.role == "head")]
    schemes: Mapping[str, Scheme | None] = {}
    if packed is not None:
        schemes = base_schemes(packed, specs)
        config = config | {"quantization_config": write_quantization_config(schemes)}
    shapes = {f"{spec.module}.{SHAPE}": spec.shape for spec in specs}
    write_files(config, out, tokens)
    stored = [each for spec in specs for each in entries(spec, schemes)]
    if (vision := read_vision(config)) is not None:
        towers = vision_shapes(vision).items()
        stored += [(VISUAL + name, torch.bfloat16, shape) for name, shape in towers]
    shards = lay_out(stored, 4_000_000_000)
    with ThreadPoolExecutor(WRITERS) as threads:
        fill = partial(write_shard, out, words=words, pool=pool, shapes=shapes)
        list(threads.map(fill, shards))
    if len(shards) > 1:
        (out / "model.safetensors.index.json").write_text(json.dumps(index_json(shards)))
    return sum(shard.size for shard in shards)


def write_shard(
    out: Path,
    shard: Shard,
    words: torch.Tensor,
    pool: torch.Tensor,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Write a shard of a folder.

    Args:
        out: the folder.
        shard: of `lay_out`.
        words: [bytes] uint8, stretches of which are codes.
        pool: [bytes] uint8, stretches of which are all other numbers.
        shapes: content of the tensors that hold the shape of a packed linear, by name.
    """
    with (out / shard.file).open("wb") as file:
        file.write(shard.header)
        for number, info in enumerate(shard.tensors):
            if info.name.endswith(SHAPE):
                file.write(torch.tensor(shapes[info.name]).view(torch.uint8).numpy().data)
                continue
            numbers = words if info.name.endswith(PACKED) else pool
            for part in stretches(numbers, number * 7919 * 2, info.nbytes):
                file.write(part.numpy().data)


def write_files(config: Mapping[str, Any], out: Path, tokens: Path | None = None) -> None:
    """Write all files of a new folder that hold no weights.

    Args:
        config: content of its config.json.
        out: the folder.
        tokens: folder whose tokenizer and chat template are copied; None trains a tokenizer.
    """
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    sees = "vision_config" in config
    if sees:
        (out / OWN_FILE).write_text(json.dumps(IMAGES, indent=2))
    if tokens is not None:
        for name in TOKENIZER_FILES:
            if (tokens / name).exists():
                shutil.copyfile(tokens / name, out / name)
        return
    first = FIRST_SPECIAL["qwen3_5" if config["model_type"].startswith("qwen3_5") else "qwen3"]
    made = tokenizer(first, SEEING_SPECIALS) if sees else tokenizer(first)
    made.save(str(out / "tokenizer.json"))
    if sees:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[-1]}
        (out / "tokenizer_config.json").write_text(json.dumps(settings))
        (out / "chat_template.jinja").write_text(TEMPLATE)


def entries(spec: TensorSpec, schemes: Mapping[str, Scheme | None]) -> list[Entry]:
    """A tensor as it is stored: itself, or its codes, scales and shape."""
    scheme = schemes.get(spec.module)
    if scheme is None:
        return [(spec.name, torch.bfloat16, spec.shape)]
    dtypes = {PACKED: torch.int32, SHAPE: torch.int64}
    N, K = spec.shape
    return [
        (f"{spec.module}.{suffix}", dtypes.get(suffix, torch.bfloat16), shape)
        for suffix, shape in packed_shapes(N, K, scheme, spec.module).items()
    ]


def stretches(numbers: torch.Tensor, start: int, size: int) -> Iterator[torch.Tensor]:
    """So many bytes of a pool that is repeated, from a place in it on."""
    start %= len(numbers)
    while size:
        part = numbers[start : start + size]
        yield part
        size -= len(part)
        start = 0


if __name__ == "__main__":
    main()
