"""A small Qwen3.5 with a vision tower, for training: its sizes, tokenizer, weights and forward.

Weights are a flat dict by the names that checkpoints on the Hub have. All pictures of a batch have
one size, and all prompts one length, so that positions and angles are shared.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from words_on_gpu import QUESTIONS

Weights = dict[str, Tensor]
LANGUAGE, VISUAL, MTP = "model.language_model.", "model.visual.", "mtp."
NAMES = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
FIRST_WORDS = (" user", " assistant")
EPS = 1e-6
PATCH, MERGE, FRAMES = 16, 2, 2
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|> ' + message.role + '\\n' }}
{%- if message.content is string %}
{{- (' ' if message.role == 'user' else '') + message.content | trim }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}
{{- (' ' if message.role == 'user' else '') + part.text | trim }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|> assistant\\n' }}
{%- endif %}
"""
PROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 262_144, "shortest_edge": 1024},
    "patch_size": PATCH,
    "temporal_patch_size": FRAMES,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def make_tokenizer() -> Tokenizer:
    """Bytes, and the words of questions; other words are spelled."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {sign: id for id, sign in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    spelled = " ".join(("", *QUESTIONS)) + "".join(FIRST_WORDS)
    words = sorted({"".join(filter(str.isalpha, word)) for word in spelled.split()})
    for word in words:
        # All merges begin with a blank, so that a word without one in front is spelled.
        joined = "Ġ"
        for letter in word:
            if joined + letter not in vocabulary:
                merges.append((joined, letter))
                vocabulary[joined + letter] = len(vocabulary)
            joined += letter
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in NAMES])
    return tokenizer


def config_of(tokenizer: Tokenizer, small: bool = False) -> dict[str, Any]:
    """config.json, as those on the Hub are; a smaller one is for a try on a CPU."""
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in NAMES}
    text = {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2 if small else 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "rms_norm_eps": EPS,
        "use_cache": True,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * (1 if small else 2),
        "full_attention_interval": 2,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": ids["im_end"],
    }
    vision: dict[str, Any] = {
        "model_type": "qwen3_5",
        "depth": 2 if small else 4,
        "hidden_size": 96 if small else 192,
        "intermediate_size": 256 if small else 512,
        "num_heads": 3 if small else 6,
        "in_channels": 3,
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "spatial_merge_size": MERGE,
        "out_hidden_size": 256,
        "num_position_embeddings": 64,
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [],
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": ids["image_pad"],
        "video_token_id": ids["video_pad"],
        "vision_start_token_id": ids["vision_start"],
        "vision_end_token_id": ids["vision_end"],
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": vision,
    }


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights by name; the patches' is [h, values]."""
    text, vision = config["text_config"], config["vision_config"]
    h, v, inner = text["hidden_size"], vision["hidden_size"], vision["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {LANGUAGE + "embed_tokens.weight": (text["vocab_size"], h)}
    for n, kind in enumerate(text["layer_types"]):
        shapes |= _layer_shapes(f"{LANGUAGE}layers.{n}.", kind, text)
    shapes[LANGUAGE + "norm.weight"] = (h,)
    shapes |= _layer_shapes(MTP + "layers.0.", "full_attention", text)
    shapes |= {f"{MTP}{n}.weight": (h,) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    shapes |= {f"{MTP}norm.weight": (h,), f"{MTP}fc.weight": (h, 2 * h)}

    def linear(name: str, rows: int, *columns: int) -> None:
        shapes[f"{VISUAL}{name}.weight"] = (rows, *columns)
        shapes[f"{VISUAL}{name}.bias"] = (rows,)

    linear("patch_embed.proj", v, 3 * FRAMES * PATCH * PATCH)
    shapes[VISUAL + "pos_embed.weight"] = (vision["num_position_embeddings"], v)
    for n in range(vision["depth"]):
        linear(f"blocks.{n}.norm1", v)
        linear(f"blocks.{n}.norm2", v)
        linear(f"blocks.{n}.attn.qkv", 3 * v, v)
        linear(f"blocks.{n}.attn.proj", v, v)
        linear(f"blocks.{n}.mlp.linear_fc1", inner, v)
        linear(f"blocks.{n}.mlp.linear_fc2", v, inner)
    merged = v * MERGE * MERGE
    linear("merger.norm", v)
    linear("merger.linear_fc1", merged, merged)
    linear("merger.linear_fc2", h, merged)
    return shapes


def _layer_shapes(prefix: str, kind: str, text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    h, inner, D = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    heads, kv = text["num_attention_heads"], text["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "mlp.gate_proj.weight": (inner, h),
        "mlp.up_proj.weight": (inner, h),
        "mlp.down_proj.weight": (h, inner),
    }
    if kind == "full_attention":
        shapes |= {
            "self_attn.q_proj.weight": (2 * heads * D, h),
            "self_attn.k_proj.weight": (kv * D, h),
            "self_attn.v_proj.weight": (kv * D, h),
            "self_attn.o_proj.weight": (h, heads * D),
            "self_attn.q_norm.weight": (D,),
            "self_attn.k_norm.weight": (D,),
        }
    else:
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        n, Dv = text["linear_num_value_heads"], text["linear_value_head_dim"]
        mixed = 2 * keys + n * Dv
        shapes |= {
            "linear_attn.in_proj_qkv.weight": (mixed, h),
            "linear_attn.in_proj_z.weight": (n * Dv, h),
            "linear_attn.in_proj_b.weight": (n, h),
            "linear_attn.in_proj_a.weight": (n, h),
            "linear_attn.conv1d.weight": (mixed, 1, text["linear_conv_kernel_dim"]),
            "linear_attn.out_proj.weight": (h, n * Dv),
            "linear_attn.dt_bias": (n,),
            "linear_attn.A_log": (n,),
            "linear_attn.norm.weight": (Dv,),
        }
    return {prefix + name: shape for name, shape in shapes.items()}


def fresh(config: dict[str, Any], generator: torch.Generator) -> Weights:
    """Random weights in FP32."""
    made = {}
    for name, shape in shapes_of(config).items():
        if name.endswith("A_log"):
            value = torch.log(0.5 + 4 * torch.rand(shape, generator=generator))
        elif name.endswith("dt_bias"):
            value = torch.full(shape, -2.0)
        elif len(shape) == 1:
            own_gain = VISUAL in name or "linear_attn.norm" in name
            value = torch.full(shape, float(own_gain and name.endswith("norm.weight")))
            if VISUAL in name and ".norm" in name and name.endswith("weight"):
                value = torch.ones(shape)
        else:
            std = 0.06 if "embed" in name and "proj" not in name else _fan_in(shape) ** -0.5
            last = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
            last |= name.endswith(("attn.proj.weight", "mlp.linear_fc2.weight"))
            value = torch.randn(shape, generator=generator) * std * (0.35 if last else 0.8)
        made[name] = value
    return made


def _fan_in(shape: tuple[int, ...]) -> int:
    return shape[1] * (shape[2] if len(shape) > 2 else 1)


def _affine(w: Weights, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def _norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], 1 + w[f"{name}.weight"], EPS)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of heads [B, heads, T, D] by angles [T, turned / 2]."""
    turned = 2 * cos.shape[-1]
    a, b = x[..., :turned].chunk(2, dim=-1)
    parts = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat([*parts, x[..., turned:]] if turned < x.shape[-1] else parts, dim=-1)


def cut(pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Patches in the order in which tokens are merged: [B, 3, H, W] of 0 to 1 to [B, N, values]."""
    B, C, H, W = pixels.shape
    side = PATCH * MERGE
    shape = (B, C, H // side, MERGE, PATCH, W // side, MERGE, PATCH)
    squares = ((pixels - 0.5) / 0.5).to(dtype).view(shape).permute(0, 2, 5, 3, 6, 1, 4, 7)
    frames = squares[:, :, :, :, :, :, None].expand(*[-1] * 6, FRAMES, -1, -1)
    return frames.reshape(B, -1, C * FRAMES * PATCH * PATCH)


def _patch_places(grid: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = (torch.arange(count, device=device) for count in grid)
    found = torch.meshgrid(rows, columns, indexing="ij")
    shape = (grid[0] // MERGE, MERGE, grid[1] // MERGE, MERGE)
    r, c = (part.reshape(shape).transpose(1, 2).flatten() for part in found)
    return r, c


def _learned(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """Learned positions for a grid of patches, corners on corners: [N, h]."""
    side = math.isqrt(len(table))
    taps = []
    for index, count in zip(_patch_places(grid, table.device), grid, strict=True):
        place = index.float() * (side - 1) / max(count - 1, 1)
        low = place.floor().long()
        share = (place - low).to(table.dtype)
        taps.append(((low, 1 - share), ((low + 1).clamp(max=side - 1), share)))
    return sum(
        (table[r * side + c] * (a * b)[:, None] for r, a in taps[0] for c, b in taps[1]),
        torch.zeros(1, table.shape[1], dtype=table.dtype, device=table.device),
    )


def see(w: Weights, config: dict[str, Any], pixels: Tensor) -> Tensor:
    """The tower: pictures [B, 3, H, W] to tokens [B, tokens, hidden] in the weights' dtype."""
    vision = config["vision_config"]
    heads, h = vision["num_heads"], vision["hidden_size"]
    grid = (pixels.shape[2] // PATCH, pixels.shape[3] // PATCH)
    table = w[VISUAL + "pos_embed.weight"]
    x = _affine(w, VISUAL + "patch_embed.proj", cut(pixels, table.dtype))
    x = x + _learned(table, grid)
    half = h // heads // 2
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, half, 2, device=x.device).float() / half)
    places = _patch_places(grid, x.device)
    angles = torch.cat([place[:, None].float() * frequencies for place in places], dim=1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    B, N, _ = x.shape
    for n in range(vision["depth"]):
        p = f"{VISUAL}blocks.{n}."
        qkv = _affine(w, p + "attn.qkv", _layer_norm(w, p + "norm1", x))
        q, k, v = qkv.view(B, N, 3, heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(_turn(q, cos, sin), _turn(k, cos, sin), v)
        x = x + _affine(w, p + "attn.proj", mixed.transpose(1, 2).reshape(B, N, h))
        inner = _affine(w, p + "mlp.linear_fc1", _layer_norm(w, p + "norm2", x))
        x = x + _affine(w, p + "mlp.linear_fc2", functional.gelu(inner, approximate="tanh"))
    squares = _layer_norm(w, VISUAL + "merger.norm", x).view(B, N // MERGE**2, -1)
    inner = functional.gelu(_affine(w, VISUAL + "merger.linear_fc1", squares))
    return _affine(w, VISUAL + "merger.linear_fc2", inner)


def _layer_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], EPS)


def text_angles(config: dict[str, Any], start: int, grid: tuple[int, int], length: int) -> Tensor:
    """Angles of a sequence with one image of `grid` tokens at `start`: [length, turned / 2]."""
    text = config["text_config"]
    rope = text["rope_parameters"]
    turned = int(text["head_dim"] * rope["partial_rotary_factor"])
    count = grid[0] * grid[1]
    after = start + max(grid)
    rows = torch.arange(count) // grid[1] + start
    columns = torch.arange(count) % grid[1] + start
    before = torch.arange(start)
    behind = torch.arange(length - start - count) + after
    time = torch.full((count,), start)
    axes = [torch.cat((before, part, behind)).double() for part in (time, rows, columns)]
    frequencies = rope["rope_theta"] ** (-torch.arange(0, turned, 2).double() / turned)
    chosen = torch.zeros(turned // 2, dtype=torch.int64)
    for axis in (1, 2):
        chosen[axis : rope["mrope_section"][axis] * 3 : 3] = axis
    angles: Tensor = torch.stack(axes)[chosen].T * frequencies
    return angles.float()


def _attend(w: Weights, p: str, x: Tensor, text: dict[str, Any], angles: Tensor) -> Tensor:
    B, T, _ = x.shape
    D = text["head_dim"]
    q, gate = functional.linear(x, w[p + "q_proj.weight"]).view(B, T, -1, 2 * D).chunk(2, dim=-1)
    k, v = (functional.linear(x, w[f"{p}{n}_proj.weight"]).view(B, T, -1, D) for n in "kv")
    q, k = _norm(w, p + "q_norm", q), _norm(w, p + "k_norm", k)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    more = q.shape[1] // k.shape[1]
    k, v = _turn(k, cos, sin).repeat_interleave(more, 1), v.repeat_interleave(more, 1)
    mixed = functional.scaled_dot_product_attention(_turn(q, cos, sin), k, v, is_causal=True)
    mixed = mixed.transpose(1, 2).reshape(B, T, -1) * torch.sigmoid(gate.reshape(B, T, -1))
    return functional.linear(mixed, w[p + "o_proj.weight"])


def _delta(w: Weights, p: str, x: Tensor, text: dict[str, Any]) -> Tensor:
    """Gated delta rule over a short sequence as one chunk, that is one triangular solve."""
    B, T, _ = x.shape
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    n, D = text["linear_num_value_heads"], text["linear_value_head_dim"]
    mixed = functional.linear(x, w[p + "in_proj_qkv.weight"]).transpose(1, 2)
    kernel = w[p + "conv1d.weight"]
    mixed = functional.conv1d(
        functional.pad(mixed, (kernel.shape[-1] - 1, 0)), kernel, groups=len(kernel)
    )
    q, k, v = torch.split(functional.silu(mixed).transpose(1, 2), [keys, keys, n * D], dim=-1)
    beta = torch.sigmoid(functional.linear(x, w[p + "in_proj_b.weight"]).float())
    a = functional.linear(x, w[p + "in_proj_a.weight"]).float()
    g = -w[p + "A_log"].float().exp() * functional.softplus(a + w[p + "dt_bias"].float())

    def heads(part: Tensor) -> Tensor:
        return part.reshape(B, T, -1, D).transpose(1, 2).float()

    def unit(part: Tensor) -> Tensor:
        return part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6)

    more = n * D // keys
    q, k = (unit(heads(part)).repeat_interleave(more, 1) for part in (q, k))
    v, beta = heads(v), beta.transpose(1, 2)[..., None]
    total = g.transpose(1, 2).cumsum(-1)
    later = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
    decay = (total[..., None] - total[..., None, :]).masked_fill(~later, -math.inf).exp()
    system = (k @ k.transpose(-1, -2) * decay * beta).tril(-1)
    system = system + torch.eye(T, device=x.device)
    new = torch.linalg.solve_triangular(system, beta * v, upper=False, unitriangular=True)
    out = (q @ k.transpose(-1, -2) * decay) @ new * D**-0.5
    normed = functional.rms_norm(out.transpose(1, 2), (D,), w[p + "norm.weight"].float(), EPS)
    z = functional.linear(x, w[p + "in_proj_z.weight"]).view(B, T, n, D)
    gated = (normed * functional.silu(z.float())).to(x.dtype).reshape(B, T, -1)
    return functional.linear(gated, w[p + "out_proj.weight"])


def _layer(w: Weights, p: str, x: Tensor, text: dict[str, Any], angles: Tensor) -> Tensor:
    normed = _norm(w, p + "input_layernorm", x)
    if p + "self_attn.q_proj.weight" in w:
        x = x + _attend(w, p + "self_attn.", normed, text, angles)
    else:
        x = x + _delta(w, p + "linear_attn.", normed, text)
    normed = _norm(w, p + "post_attention_layernorm", x)
    gate = functional.silu(functional.linear(normed, w[p + "mlp.gate_proj.weight"]))
    inner = gate * functional.linear(normed, w[p + "mlp.up_proj.weight"])
    return x + functional.linear(inner, w[p + "mlp.down_proj.weight"])


def decode(w: Weights, config: dict[str, Any], x: Tensor, angles: Tensor) -> Tensor:
    """The decoder: embeddings [B, T, h] to hidden states after the last norm."""
    text = config["text_config"]
    for n in range(text["num_hidden_layers"]):
        x = _layer(w, f"{LANGUAGE}layers.{n}.", x, text, angles)
    return _norm(w, LANGUAGE + "norm", x)


def draft(
    w: Weights, config: dict[str, Any], embedded: Tensor, hidden: Tensor, angles: Tensor
) -> Tensor:
    """The head that predicts the token after the next, from that one and the trunk's states."""
    parts = (
        _norm(w, MTP + "pre_fc_norm_embedding", embedded),
        _norm(w, MTP + "pre_fc_norm_hidden", hidden),
    )
    x = functional.linear(torch.cat(parts, dim=-1), w[MTP + "fc.weight"])
    return _norm(w, MTP + "norm", _layer(w, MTP + "layers.0.", x, config["text_config"], angles))


def save(weights: Weights, config: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
    """Write a checkpoint as those on the Hub are."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {}
    for name, value in weights.items():
        wide = name.endswith(("A_log", "linear_attn.norm.weight"))
        data = value.detach().cpu().to(torch.float32 if wide else torch.bfloat16)
        if name.endswith("patch_embed.proj.weight"):
            data = data.view(-1, 3, FRAMES, PATCH, PATCH)
        stored[name] = data.contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    stops = [tokenizer.token_to_id(sign) for sign in ends.values()]
    written = {
        "config.json": config,
        "preprocessor_config.json": PROCESSOR,
        "generation_config.json": {"eos_token_id": stops, "do_sample": False},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **ends},
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))
