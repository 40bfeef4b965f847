"""Train the bundled drafter, tiny-qwen3.5-dflash, in minutes on a CPU.

python examples/maintenance/train_tiny_drafter.py examples/models/tiny-qwen3.5 tiny-qwen3.5-dflash

The target writes the text itself, drawn from its own predictions. A block of the drafter begins at
any token of it, with mask tokens behind; the tokens that follow in the text are what to predict.
"""

import json
import time
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from train_tiny_experts import learning_rate, load, text_model

from lowbit.runtime.engine.load import load as load_target
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stats import Tally
from lowbit.runtime.state.sampling_params import SamplingParams

STORIES = Path(__file__).parents[1] / "data" / "stories-eval.txt"
BLOCK, TAPS, LAYERS, INNER = 8, (0, 1, 2), 2, 512
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
THETA, EPS = 10_000.0, 1e-6
LENGTH, BATCH, ANCHORS = 192, 8, 24  # tokens of a text, texts of a step, blocks of a text
GREEDY = SamplingParams()
DECAY = 0.85  # weight of a place in a block, against the place before it
PEAK = 2e-3
TRAINED_ON = 0.8  # of the bundled text; the rest begins the texts that are measured
MEASURED = 24  # of these


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
        "block_size": BLOCK,
        "num_target_layers": text["num_hidden_layers"],
        "dflash_config": {
            "mask_token_id": text["vocab_size"] - 1,  # padding, which no text has
            "target_layer_ids": list(TAPS),
        },
    }


class Norm(nn.Module):
    """RMS norm with a gain."""

    def __init__(self, size: int) -> None:
        """Gains of one."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate heads [B, H, T, D] by positions [B, T]."""
    frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = positions[:, None, :, None] * frequencies
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    """A layer of Qwen3 whose queries come from blocks alone."""

    def __init__(self, h: int) -> None:
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
                "q_norm": Norm(HEAD_DIM),
                "k_norm": Norm(HEAD_DIM),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(INNER, h),
                "up_proj": linear(INNER, h),
                "down_proj": linear(h, INNER),
            }
        )
        self.input_layernorm, self.post_attention_layernorm = Norm(h), Norm(h)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """[B, Q, h] of blocks behind a context [B, T, h]; mask is [B, Q, T + Q]."""
        own, mlp = self.self_attn, self.mlp
        normed = self.input_layernorm(x)
        both = torch.cat((context, normed), dim=1)

        def heads(values: Tensor) -> Tensor:
            return values.view(*values.shape[:-1], -1, HEAD_DIM).transpose(1, 2)

        q = rotated(own["q_norm"](heads(own["q_proj"](normed))), positions[:, context.shape[1] :])
        k = rotated(own["k_norm"](heads(own["k_proj"](both))), positions)
        mixed = functional.scaled_dot_product_attention(
            q, k, heads(own["v_proj"](both)), attn_mask=mask[:, None], enable_gqa=True
        )
        x = x + own["o_proj"](mixed.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        out: Tensor = mlp["down_proj"](
            functional.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed)
        )
        return x + out


class DFlash(nn.Module):
    """The drafter; its embedding and head are the target's."""

    def __init__(self, h: int) -> None:
        """Random weights."""
        super().__init__()
        self.fc = nn.Linear(len(TAPS) * h, h, bias=False)
        self.hidden_norm, self.norm = Norm(h), Norm(h)
        self.layers = nn.ModuleList(Layer(h) for _ in range(LAYERS))

    def forward(self, hidden_taps: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states of blocks.

        Args:
            hidden_taps: [B, T, n * h] of a text.
            blocks: [B, A * BLOCK, h], embedded tokens.
            anchors: [B, A], place of each block's first token in the text.

        Returns:
            [B, A * BLOCK, h], after the last norm.
        """
        B, T, _ = hidden_taps.shape
        context = self.hidden_norm(self.fc(hidden_taps))
        own = (anchors[..., None] + torch.arange(BLOCK)).flatten(1)
        first = anchors.repeat_interleave(BLOCK, dim=1)
        positions = torch.cat((torch.arange(T).expand(B, T), own), dim=1)
        seen = torch.arange(T) < first[..., None]
        number = torch.arange(anchors.shape[1]).repeat_interleave(BLOCK)
        mask = torch.cat((seen, (number[:, None] == number).expand(B, -1, -1)), dim=2)
        x = blocks
        for layer in self.layers:
            x = layer(x, context, positions, mask)
        normed: Tensor = self.norm(x)
        return normed


def own_texts(folder: Path, count: int, temperature: float) -> Tensor:
    """Texts that the target writes behind the first words of others: [count, LENGTH]."""
    model = load_target(folder, device="cpu", context=LENGTH, max_sequences=16)
    ids = model.tokenizer.encode(STORIES.read_text(), framed=False)
    ids = ids[: int(TRAINED_ON * len(ids))]
    generator = torch.Generator().manual_seed(0)
    requests, handles = [], []
    for number in range(count):
        length = int(torch.randint(2, 24, (), generator=generator))
        start = int(torch.randint(len(ids) - length, (), generator=generator))
        params = SamplingParams(temperature if number % 4 else 0.0, seed=number)
        request = Request(tuple(ids[start : start + length]), params, LENGTH - length)
        requests.append(request)
        handles.append(model.engine.submit(request))
    texts = []
    for number, (request, handle) in enumerate(zip(requests, handles, strict=True)):
        texts.append([*request.prompt, *handle.result()])
        if number % 200 == 0:
            click.echo(f"text {number} of {count}")
    return torch.tensor(texts)


@torch.no_grad()
def tapped(target: Any, texts: Tensor) -> Tensor:
    """Outputs of the target's layers that the drafter reads: [B, T, n * h] bfloat16."""
    parts = []
    for some in torch.split(texts, BATCH):
        found = target.model(some, output_hidden_states=True).hidden_states
        parts.append(torch.cat([found[1 + layer] for layer in TAPS], dim=-1).bfloat16())
    return torch.cat(parts)


def blocks_of(texts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Blocks somewhere in texts: anchors [B, A] and the tokens that are right [B, A, BLOCK]."""
    shape = len(texts), ANCHORS
    anchors = torch.randint(1, texts.shape[1] - BLOCK, shape, generator=generator)
    places = anchors[..., None] + torch.arange(BLOCK)
    return anchors, texts.gather(1, places.flatten(1)).view(*shape, BLOCK)


def train(drafter: DFlash, target: Any, texts: Tensor, mask: int, minutes: float) -> None:
    """Train the drafter with the target as it is."""
    optimizer = torch.optim.AdamW(drafter.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    weight = DECAY ** torch.arange(BLOCK - 1)
    states = tapped(target, texts)
    started, number = time.monotonic(), 0
    while (done := (time.monotonic() - started) / (60 * minutes)) < 1:
        chosen = torch.randint(len(texts), (BATCH,), generator=generator)
        batch = texts[chosen]
        anchors, right = blocks_of(batch, generator)
        given = right.clone()
        given[..., 1:] = mask
        embedded = target.model.embed_tokens(given.flatten(1))
        hidden = drafter(states[chosen].float(), embedded, anchors).view(*right.shape, -1)[:, :, 1:]
        logits = target.lm_head(hidden)
        loss = functional.cross_entropy(
            logits.flatten(0, 2), right[..., 1:].flatten(), reduction="none"
        ).view(-1, BLOCK - 1)
        optimizer.zero_grad()
        mean = (loss * weight).sum(1).mean().div(weight.sum())
        mean.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = PEAK * learning_rate(done)
        optimizer.step()
        if number % 50 == 0:
            hits = (logits.argmax(-1) == right[..., 1:]).long().cumprod(-1).sum(-1)
            click.echo(
                f"{number}: {100 * done:.0f} %, loss {loss.mean():.3f}, "
                f"{1 + hits.float().mean():.2f} tokens a round"
            )
        number += 1


def measure(folder: Path, drafter: Path) -> None:
    """Print tokens a round on greedy texts that begin like none of the training."""
    model = load_target(
        folder, device="cpu", context=LENGTH, speculate="dflash", drafter=drafter, draft_tokens=7
    )
    ids = model.tokenizer.encode(STORIES.read_text(), framed=False)
    first, tally = int(TRAINED_ON * len(ids)), Tally()
    for start in range(first, len(ids) - 32, (len(ids) - first) // MEASURED):
        handle = model.engine.submit(Request(tuple(ids[start : start + 24]), GREEDY, 120))
        handle.result()
        tally.add(handle.tally)
    found = tally.speculated
    click.echo(f"{found.rounds} rounds, {found.words}; accepted {found.accepted}")


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--minutes", default=12.0, show_default=True, help="Time for the training.")
@click.option("--texts", "count", default=1200, show_default=True, help="Texts to train on.")
@click.option("--temperature", default=0.6, show_default=True, help="Of three texts in four.")
def main(folder: Path, out: Path, minutes: float, count: int, temperature: float) -> None:
    """Train a DFlash drafter for the target model FOLDER into the folder OUT."""
    torch.manual_seed(0)
    content = json.loads((folder / "config.json").read_text())
    texts = own_texts(folder, count, temperature)
    target = text_model(content).eval().requires_grad_(False)
    weights = load_file(folder / "model.safetensors")
    load(target, {n.replace("model.language_model.", "model."): w for n, w in weights.items()})
    config = drafter_config(content)
    drafter = DFlash(config["hidden_size"])
    train(drafter, target, texts, config["dflash_config"]["mask_token_id"], minutes)
    out.mkdir(parents=True, exist_ok=True)
    stored = {name: w.detach().bfloat16().contiguous() for name, w in drafter.state_dict().items()}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    measure(folder, out)


if __name__ == "__main__":
    main()
