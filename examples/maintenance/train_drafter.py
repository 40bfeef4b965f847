"""Train a DFlash drafter for a real model in minutes on a GPU, on answers that the model writes.

python examples/maintenance/draft_prompts.py prompts --code /usr/lib/python3 --prose wiki.txt
python examples/maintenance/train_drafter.py texts coder-int4 prompts/train.jsonl train.safetensors
python examples/maintenance/train_drafter.py texts coder-int4 prompts/code.jsonl code.safetensors \\
    --temperature 0
python examples/maintenance/train_drafter.py train coder-int4 train.safetensors drafter \\
    --held-out code.safetensors --minutes 15
python examples/maintenance/measure_drafters.py coder-int4 drafter --prompts prompts/code.jsonl \\
    --device cuda

A block begins at any token of an answer. What a place should predict is the model's distribution
there, behind the right tokens, at the temperature that answers are drawn with. The model runs as it
is served: of a packed folder the weights are those of its codes.
"""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from draft_prompts import values_of
from drafter_layers import DFlash, Sizes, drafter_config, write
from safetensors.torch import load_file, save_file
from tiny_heads import DRAFTS
from torch import Tensor, nn
from train_tiny_experts import learning_rate, text_model

from lowbit.formats.layout.packing import dequantize, unpack
from lowbit.formats.packed import open_packed
from lowbit.runtime.engine.load import load
from lowbit.runtime.state.sampling_params import SamplingParams

TEMPERATURE = 0.7  # of answers to train on, and of what is learned from them
PROMPT, LEAST = 384, 8  # most tokens of a prompt, least of an answer
LAYERS, TAPPED = 5, 5  # of the drafter, and layers of the target that it reads
DECAY = 0.8  # weight of a place in a block, against the place before it
ROWS = 2048  # places whose logits are there at a time
WIDTH = 64  # batches are padded to a multiple


@dataclass(frozen=True)
class Texts:
    """Prompts and their answers, one behind the other on one device."""

    tokens: Tensor  # [tokens] int64
    starts: Tensor  # [N] int64, where each begins
    prompts: Tensor  # [N] int64, tokens of its prompt
    lengths: Tensor  # [N] int64, tokens of prompt and answer

    def batch(self, chosen: Tensor) -> Tensor:
        """Texts [B, T] int64; what pads them is of other texts, which none of them sees."""
        T = -(-int(self.lengths[chosen].max()) // WIDTH) * WIDTH
        places = self.starts[chosen, None] + torch.arange(T, device=self.tokens.device)
        return self.tokens[places.clamp(max=len(self.tokens) - 1)]


def read_texts(path: Path, device: str) -> Texts:
    """Texts of a file that `write_texts` has written."""
    found = {name: values.long() for name, values in load_file(path).items()}
    starts = found["lengths"].cumsum(0) - found["lengths"]
    parts = found["tokens"], starts, found["prompts"], found["lengths"]
    return Texts(*(each.to(device) for each in parts))


def write_texts(texts: Sequence[tuple[Sequence[int], Sequence[int]]], path: Path) -> None:
    """Write pairs of a prompt and an answer."""
    flat = [token for prompt, answer in texts for token in (*prompt, *answer)]
    stored = {
        "tokens": flat,
        "prompts": [len(prompt) for prompt, _ in texts],
        "lengths": [len(prompt) + len(answer) for prompt, answer in texts],
    }
    made = {name: torch.tensor(values, dtype=torch.int32) for name, values in stored.items()}
    save_file(made, path)


def target_model(folder: Path, device: str) -> Any:
    """The decoder of a folder, packed or not, as transformers builds it; on a GPU in BF16."""
    packed = open_packed(folder)
    content = {
        key: v for key, v in packed.checkpoint.config.items() if key != "quantization_config"
    }
    stored: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        stored |= load_file(path)
    weights = {}
    for spec in packed.specs:
        if scheme := packed.schemes.get(spec.module):
            codes = unpack(stored[f"{spec.module}.weight_packed"], scheme.bits, spec.shape[1])
            weight = dequantize(codes, stored[f"{spec.module}.weight_scale"])
        else:
            weight = stored[spec.name]
        weights[spec.name.replace("model.language_model.", "model.")] = weight.float()
    model = text_model({"tie_word_embeddings": False, **content})
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    own = model.state_dict()
    model.load_state_dict({name: weights[name] for name in own})
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return model.eval().requires_grad_(False).to(device, dtype)


def sizes_of(config: dict[str, Any], layers: int) -> Sizes:
    """Sizes of a drafter whose layers are as wide as the target's."""
    text = config.get("text_config", config)
    h, heads, depth = (
        text[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    last, count = max(1, depth - 3), TAPPED - 1
    taps = sorted({round(1 + at * (last - 1) / count) for at in range(TAPPED)})
    theta = text.get("rope_theta") or text["rope_parameters"]["rope_theta"]
    return Sizes(
        tuple(taps),
        layers,
        inner=text["intermediate_size"],
        heads=heads,
        kv_heads=text["num_key_value_heads"],
        head_dim=text.get("head_dim") or h // heads,
        theta=float(theta),
    )


class HeadLoss(torch.autograd.Function):
    """Cross-entropy of drafts to what the target predicts there, a part of the logits at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, final: Tensor, head: Tensor, weight: Tensor) -> Tensor:
        """Sum of the losses of M places by their weights [M].

        Args:
            ctx: keeps the gradient.
            hidden: [M, h], of the drafter after its last norm.
            final: [M, h], of the target after its last norm, at the place before.
            head: [V, h], of the target.
            weight: [M] FP32.
        """
        total, gradient = weight.new_zeros(()), torch.empty_like(hidden)
        parts = (torch.split(each, ROWS) for each in (hidden, final, weight, gradient))
        for own, right, share, out in zip(*parts, strict=True):
            aim = (right.to(head.dtype) @ head.T).float().div_(TEMPERATURE).softmax(-1)
            logs = (own.to(head.dtype) @ head.T).float().log_softmax(-1)
            total -= (aim * logs).sum(-1) @ share
            off = logs.exp_().sub_(aim).mul_(share[:, None])
            out.copy_(off.to(head.dtype) @ head)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor | None, ...]:
        """Gradient of the drafter's hidden states alone."""
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None, None


@dataclass(frozen=True)
class Trained:
    """A drafter and its target on one device."""

    target: Any
    trunk: DFlash
    taps: tuple[int, ...]
    mask: int  # token of the places to draft
    device: str

    def blocks(
        self, ids: Tensor, anchors: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Places to draft, behind blocks that begin at anchors [B, A] of texts ids [B, T].

        Returns:
            hidden: [M, h] of the drafter, M = B * A * DRAFTS.
            final: [M, h] of the target at the place before each.
            right: [B, A, DRAFTS], tokens of the texts.
            known: [B, A, DRAFTS] bool, the text goes so far.
        """
        B, A = anchors.shape
        places = anchors[..., None] + torch.arange(1 + DRAFTS, device=ids.device)
        known = places[..., 1:] < lengths[:, None, None]
        places = places.clamp(max=ids.shape[1] - 1).flatten(1)
        tokens = ids.gather(1, places).view(B, A, -1)
        with torch.no_grad():
            found = self.target.model(ids, output_hidden_states=True, use_cache=False)
            tapped = torch.cat([found.hidden_states[1 + layer] for layer in self.taps], dim=-1)
            before = places.view(B, A, -1)[..., :-1].flatten(1)
            final = found.last_hidden_state.take_along_dim(before[..., None], dim=1)
            given = torch.full_like(tokens, self.mask)
            given[..., 0] = tokens[..., 0]
            embedded = self.target.model.embed_tokens(given.flatten(1)).float()
        kind = self.device.partition(":")[0]
        with torch.autocast(kind, torch.bfloat16, enabled=kind != "cpu"):
            hidden = self.trunk(self.trunk.context(tapped), embedded, anchors)
        own = hidden.view(B * A, 1 + DRAFTS, -1)[:, 1:].flatten(0, 1)
        return own, final.flatten(0, 1), tokens[..., 1:], known

    @torch.no_grad()
    def tokens_a_round(self, texts: Texts, batch: int, anchors: int) -> float:
        """Tokens of a round where the likeliest drafts meet the tokens of texts."""
        total, count, head = 0.0, 0, self.target.lm_head.weight
        for chosen in torch.split(torch.arange(len(texts.lengths), device=self.device), batch):
            prompts, lengths = texts.prompts[chosen], texts.lengths[chosen]
            share = (torch.arange(anchors, device=self.device) + 0.5) / anchors
            at = (prompts[:, None] + share * (lengths - 1 - prompts)[:, None]).long()
            hidden, _, right, known = self.blocks(texts.batch(chosen), at, lengths)
            drafts = [
                (each.to(head.dtype) @ head.T).argmax(-1) for each in torch.split(hidden, ROWS)
            ]
            hits = (torch.cat(drafts).view_as(right) == right) & known
            total += float(hits.long().cumprod(-1).sum())
            count += at.numel()
        return 1 + total / count


def batches(texts: Texts, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Texts of about one length: [size] each, or all where there are fewer.

    All come once before any comes again, but for the longest, of which no whole batch is left.
    """
    lengths = texts.lengths.cpu()
    while True:
        order = (lengths + 16 * torch.rand(len(lengths), generator=generator)).argsort()
        parts = [each for each in torch.split(order, size) if len(each) == size] or [order]
        for number in torch.randperm(len(parts), generator=generator).tolist():
            yield parts[number].to(texts.lengths.device)


@click.group()
def main() -> None:
    """Train a drafter for a real model."""


@main.command("texts")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--minutes", default=3.0, show_default=True, help="No answer begins later.")
@click.option("--new-tokens", default=320, show_default=True, help="Most of an answer.")
@click.option("--temperature", default=TEMPERATURE, show_default=True, help="0 is greedy.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--together", default=64, show_default=True, help="Answers made together.")
@click.option("--activations", default="exact", show_default=True, help="As of lowbit-run.")
def answer(
    folder: Path,
    prompts: Path,
    out: Path,
    minutes: float,
    new_tokens: int,
    temperature: float,
    device: str,
    together: int,
    activations: Any,
) -> None:
    """Let the model FOLDER answer PROMPTS: tokens into OUT, answers beside it as .txt."""
    model = load(
        folder,
        device=device,
        speculate="off",
        context=PROMPT + new_tokens,
        max_sequences=together,
        activations=activations,
    )
    lines = values_of(prompts, "prompt")
    started, texts, waiting = time.monotonic(), [], deque()  # type: ignore[var-annotated]

    def finish() -> None:
        ids, handle = waiting.popleft()
        found = handle.result()
        if len(found) >= LEAST:
            texts.append((ids, found))
        if len(texts) % 512 == 0:
            tokens, seconds = sum(len(each) for _, each in texts), time.monotonic() - started
            click.echo(f"{len(texts)} answers, {tokens} tokens, {seconds:.0f} s")

    for number, line in enumerate(lines):
        if time.monotonic() - started > 60 * minutes:
            break
        ids = model.encode(line)
        if len(ids) > PROMPT:
            continue
        drawn = SamplingParams(temperature, seed=number) if temperature else SamplingParams()
        request = model.request(ids, sampling=drawn, max_new_tokens=new_tokens)
        waiting.append((ids, model.engine.submit(request)))
        if len(waiting) > 2 * together:
            finish()
    while waiting:
        finish()
    if not texts:
        raise click.ClickException(
            f"no answer has {LEAST} tokens or more, of the {len(lines)} prompts in {prompts}; "
            f"prompts of more than {PROMPT} tokens are left out, and no answer begins after "
            f"{minutes:g} minutes"
        )
    write_texts(texts, out)
    said = "\n\n".join(model.tokenizer.decode(found) for _, found in texts)
    out.with_suffix(".txt").write_text(said, "utf-8")
    tokens, seconds = sum(len(each) for _, each in texts), time.monotonic() - started
    click.echo(f"{out}: {len(texts)} answers, {tokens} tokens, {seconds:.0f} s")


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("train_on", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--held-out", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--minutes", default=15.0, show_default=True, help="Time of the training.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--layers", default=LAYERS, show_default=True)
@click.option("--batch", default=64, show_default=True, help="Texts of a step.")
@click.option("--anchors", default=64, show_default=True, help="Blocks of a text.")
@click.option("--peak", default=1e-3, show_default=True, help="Highest learning rate.")
@click.option("--every", default=60.0, show_default=True, help="Seconds between measurements.")
def train(
    folder: Path,
    train_on: Path,
    out: Path,
    held_out: tuple[Path, ...],
    minutes: float,
    device: str,
    layers: int,
    batch: int,
    anchors: int,
    peak: float,
    every: float,
) -> None:
    """Train a drafter OUT for the model FOLDER on answers of it."""
    torch.manual_seed(0)
    config = json.loads((folder / "config.json").read_text())
    sizes = sizes_of(config, layers)
    content = drafter_config(config, sizes)
    trunk = DFlash(content["hidden_size"], sizes=sizes).to(device)
    mask = content["dflash_config"]["mask_token_id"]
    made = Trained(target_model(folder, device), trunk, sizes.taps, mask, device)
    texts = read_texts(train_on, device)
    others = {path.stem: read_texts(path, device) for path in held_out}
    count = sum(p.numel() for p in trunk.parameters())
    click.echo(
        f"{count / 1e6:.1f} M parameters, taps {sizes.taps}, {len(texts.lengths)} texts of "
        f"{len(texts.tokens)} tokens"
    )
    optimizer = torch.optim.AdamW(trunk.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    decay = DECAY ** torch.arange(DRAFTS, device=device)
    head = made.target.lm_head.weight
    started = last = time.monotonic()
    for number, chosen in enumerate(batches(texts, batch, generator)):
        now = time.monotonic()
        done = (now - started) / (60 * minutes)
        if done >= 1:
            break
        prompts, lengths = texts.prompts[chosen], texts.lengths[chosen]
        share = torch.rand(len(chosen), anchors, device=device)
        at = prompts[:, None] + (share * (lengths - 1 - prompts)[:, None]).long()
        hidden, final, _, known = made.blocks(texts.batch(chosen), at, lengths)
        weight = (known * decay).flatten().float()
        loss: Any = HeadLoss.apply(hidden, final, head, weight)  # type: ignore[no-untyped-call]
        loss = loss / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trunk.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = peak * learning_rate(done)
        optimizer.step()
        if number % 50 == 0:
            click.echo(f"{number}: {100 * done:.0f} %, {now - started:.0f} s, loss {loss:.3f}")
        if now - last > every:
            report(made, others, batch, anchors)
            write(trunk.state_dict(), content, out)
            last = time.monotonic()
    write(trunk.state_dict(), content, out)
    click.echo(f"{number} steps, {time.monotonic() - started:.0f} s")
    report(made, others, batch, anchors)


def report(made: Trained, others: dict[str, Texts], batch: int, anchors: int) -> None:
    """Say how many tokens of held-out texts a round has."""
    for name, texts in others.items():
        found = made.tokens_a_round(texts, batch, anchors)
        click.echo(f"{name}: {found:.2f} tokens a round")


if __name__ == "__main__":
    main()
