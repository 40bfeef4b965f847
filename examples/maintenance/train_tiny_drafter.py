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
from drafter_layers import TINY, DFlash, drafter_config, write
from measure_drafters import STORIES, TRAINED_ON, measured
from safetensors.torch import load_file
from tiny_heads import DRAFTS, KINDS, Blocks, Kind
from torch import Tensor, nn
from train_tiny_experts import learning_rate, load, text_model

from lowbit.runtime.text.tokenizer import load_tokenizer

LENGTH, BEGUN = 192, 12  # tokens of a text, and of another that it begins with
BATCH, ANCHORS = 8, 12  # texts of a step, blocks of a text
DECAY = 0.85  # weight of a place in a block, against the place before it
PEAK = 2e-3
KNOWN = 64  # steps whose blocks are computed once, where the layers stay as they are


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
        parts.append(torch.cat([found[1 + layer] for layer in TINY.taps], dim=-1).bfloat16())
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
        self.trunk = DFlash(h, kind.size, kind.convolved)
        self.head, self.mask = kind.head(h, vocabulary), mask

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
        return {**self.trunk.state_dict(), **self.head.state_dict()}


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
        write(drafter.stored(), kind.config(config), place)
        click.echo(f"{name}: {measured(folder, place):.2f} tokens a round")


if __name__ == "__main__":
    main()
