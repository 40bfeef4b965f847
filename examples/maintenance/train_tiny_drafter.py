"""Train the bundled drafter, tiny-qwen3.5-dflash, in minutes on a CPU; or other heads on it.

python examples/maintenance/train_tiny_drafter.py examples/models/tiny-qwen3.5 tiny-qwen3.5-dflash
python examples/maintenance/train_tiny_drafter.py examples/models/tiny-qwen3.5 heads \\
    --trunk examples/models/tiny-qwen3.5-dflash --kind xpress --kind lilicorr --tune 0

The target writes the text itself, drawn from its own predictions. A block of the drafter begins at
any token of it, with mask tokens behind; the tokens that follow in the text are what to predict.
`measure_drafters.py` measures the results.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from measure_drafters import STORIES, TRAINED_ON, measured
from safetensors.torch import load_file, save_file
from tiny_heads import DRAFTS, KINDS, Blocks, Convolution, Gain, Kind
from torch import Tensor, nn
from torch.nn import functional
from train_tiny_experts import learning_rate, load, text_model

from lowbit.runtime.text.tokenizer import load_tokenizer

TAPS, LAYERS, INNER = (0, 1, 2), 2, 512
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
THETA, EPS = 10_000.0, 1e-6
LENGTH, BEGUN = 192, 12  # tokens of a text, and of another that it begins with
BATCH, ANCHORS = 8, 12  # texts of a step, blocks of a text
DECAY = 0.85  # weight of a place in a block, against the place before it
PEAK = 2e-3
KNOWN = 64  # steps whose blocks are computed once, where the layers stay as they are


def drafter_config(target: dict[str, Any]) -> dict[str, Any]:
    """config.json of the drafter, as those on the Hub are."""
    text = target.get("text_config", target)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": text["max_position_embeddings"],
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * LAYERS,
        "block_size": 1 + DRAFTS,
        "num_target_layers": text["num_hidden_layers"],
        "dflash_config": {
            "mask_token_id": text["vocab_size"] - 1,  # padding, which no text has
            "target_layer_ids": list(TAPS),
        },
    }


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate heads [B, H, T, D] by positions [B, T]."""
    frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = positions[:, None, :, None] * frequencies
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    """A layer of Qwen3 whose queries come from blocks alone."""

    attention_conv: Convolution | None = None
    mlp_conv: Convolution | None = None

    def __init__(self, h: int, convolved: bool) -> None:
        """Random weights."""
        super().__init__()

        def linear(rows: int, columns: int) -> nn.Linear:
            made = nn.Linear(columns, rows, bias=False)
            nn.init.normal_(made.weight, std=columns**-0.5)
            return made

        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(HEADS * HEAD_DIM, h),
                "k_proj": linear(KV_HEADS * HEAD_DIM, h),
                "v_proj": linear(KV_HEADS * HEAD_DIM, h),
                "o_proj": linear(h, HEADS * HEAD_DIM),
                "q_norm": Gain(HEAD_DIM),
                "k_norm": Gain(HEAD_DIM),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(INNER, h),
                "up_proj": linear(INNER, h),
                "down_proj": linear(h, INNER),
            }
        )
        self.input_layernorm, self.post_attention_layernorm = Gain(h), Gain(h)
        if convolved:
            self.attention_conv, self.mlp_conv = Convolution(h), Convolution(h)

    def forward(
        self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor, size: int
    ) -> Tensor:
        """[B, Q, h] of blocks behind a context [B, T, h]; mask is [B, Q, T + Q]."""
        own, mlp = self.self_attn, self.mlp

        def around(conv: Convolution | None, given: Tensor, x: Tensor, side: int) -> Tensor:
            return x if conv is None else conv(given, x, side, size)

        given = self.input_layernorm(x)
        normed = around(self.attention_conv, given, given, 0)
        both = torch.cat((context, normed), dim=1)

        def heads(values: Tensor) -> Tensor:
            return values.view(*values.shape[:-1], -1, HEAD_DIM).transpose(1, 2)

        q = rotated(own["q_norm"](heads(own["q_proj"](normed))), positions[:, context.shape[1] :])
        k = rotated(own["k_norm"](heads(own["k_proj"](both))), positions)
        mixed = functional.scaled_dot_product_attention(
            q, k, heads(own["v_proj"](both)), attn_mask=mask[:, None], enable_gqa=True
        )
        mixed = own["o_proj"](mixed.transpose(1, 2).flatten(2))
        x = x + around(self.attention_conv, given, mixed, 1)
        given = self.post_attention_layernorm(x)
        normed = around(self.mlp_conv, given, given, 0)
        out = mlp["down_proj"](functional.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        return x + around(self.mlp_conv, given, out, 1)


class DFlash(nn.Module):
    """The layers of a drafter; its embedding and head are the target's."""

    def __init__(self, h: int, kind: Kind) -> None:
        """Random weights."""
        super().__init__()
        self.size = kind.size
        self.fc = nn.Linear(len(TAPS) * h, h, bias=False)
        self.hidden_norm, self.norm = Gain(h), Gain(h)
        self.layers = nn.ModuleList(Layer(h, kind.convolved) for _ in range(LAYERS))

    def context(self, hidden_taps: Tensor) -> Tensor:
        """Context [B, T, h] of a text by outputs of the target's layers [B, T, n * h]."""
        normed: Tensor = self.hidden_norm(self.fc(hidden_taps))
        return normed

    def forward(self, context: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states of blocks.

        Args:
            context: [B, T, h] of a text.
            blocks: [B, A * size, h], embedded tokens.
            anchors: [B, A], place of each block's first token in the text.

        Returns:
            [B, A * size, h], after the last norm.
        """
        B, T, _ = context.shape
        own = (anchors[..., None] + torch.arange(self.size)).flatten(1)
        first = anchors.repeat_interleave(self.size, dim=1)
        positions = torch.cat((torch.arange(T).expand(B, T), own), dim=1)
        seen = torch.arange(T) < first[..., None]
        number = torch.arange(anchors.shape[1]).repeat_interleave(self.size)
        mask = torch.cat((seen, (number[:, None] == number).expand(B, -1, -1)), dim=2)
        x = blocks
        for layer in self.layers:
            x = layer(x, context, positions, mask, self.size)
        normed: Tensor = self.norm(x)
        return normed


@torch.no_grad()
def own_texts(folder: Path, target: Any, count: int, temperature: float) -> Tensor:
    """Texts that the target writes behind the first words of others: [count, LENGTH]."""
    torch.manual_seed(0)
    ids = load_tokenizer(folder).encode(STORIES.read_text(), framed=False)
    ids = ids[: int(TRAINED_ON * len(ids))]
    starts = torch.randint(len(ids) - BEGUN, (count,)).tolist()
    prompts = torch.tensor([ids[start : start + BEGUN] for start in starts])
    texts = []
    for number, some in enumerate(torch.split(prompts, count // 4 or 1)):
        drawn = {"do_sample": True, "temperature": temperature} if number else {"do_sample": False}
        more = LENGTH - BEGUN
        texts.append(target.generate(some, max_new_tokens=more, min_new_tokens=more, **drawn))
        click.echo(f"{sum(map(len, texts))} of {count} texts")
    return torch.cat(texts)


@torch.no_grad()
def tapped(target: Any, texts: Tensor) -> Tensor:
    """Outputs of the target's layers that the drafter reads: [B, T, n * h] bfloat16."""
    parts = []
    for some in torch.split(texts, BATCH):
        found = target.model(some, output_hidden_states=True).hidden_states
        parts.append(torch.cat([found[1 + layer] for layer in TAPS], dim=-1).bfloat16())
    return torch.cat(parts)


def blocks_of(texts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Blocks somewhere in texts: anchors [B, A] and the right tokens [B, A, 1 + DRAFTS]."""
    shape = len(texts), ANCHORS
    anchors = torch.randint(1, texts.shape[1] - DRAFTS, shape, generator=generator)
    places = anchors[..., None] + torch.arange(1 + DRAFTS)
    return anchors, texts.gather(1, places.flatten(1)).view(*shape, 1 + DRAFTS)


class Drafter(nn.Module):
    """A drafter's layers and its head."""

    def __init__(self, h: int, vocabulary: int, kind: Kind, mask: int) -> None:
        """Random weights; `mask` is the token of places to draft."""
        super().__init__()
        self.trunk, self.head, self.mask = DFlash(h, kind), kind.head(h, vocabulary), mask

    def blocks(self, target: Any, states: Tensor, texts: Tensor, made: Any) -> Blocks:
        """Blocks of texts [B, T], by outputs of the target's layers [B, T, n * h]."""
        anchors, right = made
        size, embedding = self.trunk.size, target.model.embed_tokens
        given = torch.full((*right.shape[:2], size), self.mask)
        given[..., 0] = right[..., 0]
        context = self.trunk.context(states.float())
        hidden = self.trunk(context, embedding(given.flatten(1)), anchors)
        hidden = hidden.view(-1, size, hidden.shape[-1])
        before = context.take_along_dim(anchors[..., None] - 1, dim=1).flatten(0, 1)
        flat = right.flatten(0, 1)
        logits = target.lm_head(hidden[:, -DRAFTS:])
        return Blocks(hidden, flat, logits, embedding(flat), embedding.weight, before)

    def stored(self) -> dict[str, Tensor]:
        """Tensors by the names that they have in files."""
        own = {**self.trunk.state_dict(), **self.head.state_dict()}
        return {name: w.detach().bfloat16().contiguous() for name, w in own.items()}


def train(drafter: Drafter, target: Any, texts: Tensor, steps: int, tuned: float) -> None:
    """Train a drafter with the target as it is.

    Args:
        tuned: learning rate of its layers, against that of its head; 0 leaves them as they are.
    """
    parts: list[dict[str, Any]] = [
        {"params": [*part.parameters()], "share": share}
        for part, share in ((drafter.trunk, tuned), (drafter.head, 1.0))
        if share
    ]
    optimizer = torch.optim.AdamW(parts, betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    weight = DECAY ** torch.arange(DRAFTS)
    states = tapped(target, texts)

    def made() -> Blocks:
        chosen = torch.randint(len(texts), (BATCH,), generator=generator)
        places = blocks_of(texts[chosen], generator)
        return drafter.blocks(target, states[chosen], texts[chosen], places)

    with torch.no_grad():  # by layers that stay as they are
        known = [] if tuned else [made() for _ in range(min(steps, KNOWN))]
    for number in range(steps):
        loss = drafter.head.losses(known[number % KNOWN] if known else made())
        optimizer.zero_grad()
        mean = (loss * weight).sum(1).mean().div(weight.sum())
        mean.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = PEAK * group["share"] * learning_rate(number / steps)
        optimizer.step()
        if number % 50 == 0:
            click.echo(f"{number} of {steps}: loss {loss.mean():.3f}")


def write(drafter: Drafter, config: dict[str, Any], out: Path) -> None:
    """Write a drafter as published ones look."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(drafter.stored(), out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--kind", "kinds", type=click.Choice([*KINDS]), multiple=True, default=["dflash"])
@click.option("--trunk", type=click.Path(exists=True, path_type=Path), help="Layers to begin with.")
@click.option(
    "--tune",
    default=1.0,
    show_default=True,
    help="Learning rate of the layers by that \
of the head; 0 leaves them.",
)
@click.option("--steps", default=1500, show_default=True, help="Of the training of each.")
@click.option("--texts", "count", default=1200, show_default=True, help="Texts to train on.")
@click.option("--temperature", default=0.6, show_default=True, help="Of three texts in four.")
def main(
    folder: Path,
    out: Path,
    kinds: Sequence[str],
    trunk: Path | None,
    tune: float,
    steps: int,
    count: int,
    temperature: float,
) -> None:
    """Train drafters for the target model FOLDER into OUT, or OUT/KIND where there are several."""
    if tune == 0 and "dflash" in kinds:
        raise click.UsageError("--tune 0 leaves nothing of dflash to train")
    content = json.loads((folder / "config.json").read_text())
    target = text_model(content).eval().requires_grad_(False)
    weights = load_file(folder / "model.safetensors")
    load(target, {n.replace("model.language_model.", "model."): w for n, w in weights.items()})
    texts = own_texts(folder, target, count, temperature)
    config = drafter_config(content)
    sizes = config["hidden_size"], config["vocab_size"]
    for name in kinds:
        torch.manual_seed(0)
        kind = KINDS[name]
        drafter = Drafter(*sizes, kind, config["dflash_config"]["mask_token_id"])
        if trunk is not None:
            known = {name: w.float() for name, w in load_file(trunk / "model.safetensors").items()}
            drafter.trunk.load_state_dict({**drafter.trunk.state_dict(), **known})
        train(drafter, target, texts, steps, tune)
        place = out / name if len(kinds) > 1 else out
        write(drafter, kind.config(config), place)
        click.echo(f"{name}: {measured(folder, place):.2f} tokens a round")


if __name__ == "__main__":
    main()
