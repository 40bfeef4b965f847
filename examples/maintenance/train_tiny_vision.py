"""Train the bundled model that reads pictures, tiny-qwen3.5-vision, in minutes on one GPU.

python examples/maintenance/draw_words.py FONTS DRAWN
python examples/maintenance/train_tiny_vision.py DRAWN tiny-qwen3.5-vision --minutes 6.9

That is how the bundled weights were made on an H200, in 6,599 steps of 1,024 pictures. They read
233 of 240 pictures that Pillow drew and training never saw. They read single words and lowest bars
well, and one of many words, found by its neighbor, badly: the script prints the rate of each kind.

Pictures are composed where the model trains. Beside the answer, each token of a picture has to tell
which letters have their centers where in it, and their places in their words: that teaches the
tower to read before the decoder knows where to look.
"""

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy
import tiny_seeing_model as seeing
import torch
from draw_words import CHARACTERS
from safetensors.torch import load_file
from tiny_seeing_model import LANGUAGE, MTP, VISUAL, Weights
from torch import Tensor
from torch.nn import functional
from words_on_gpu import MOST_PLACES, SLOTS, SQUARE, Batch, Painter, Piece, read_letters

CHARACTER_HEAD, PLACE_HEAD = "aux.characters", "aux.places"
FUSED = MTP + "fc.weight"
EMBEDDING = LANGUAGE + "embed_tokens.weight"
CLASSES = len(CHARACTERS) + 1
BLANK = 0.02  # weight of a place without a letter; most have none
GROUP = 128  # inputs that share a scale where rounding is imitated
PEAK = {"matrices": 0.02, "rest": 1.5e-3}  # learning rates
MOMENTUM = 0.95
EASY, SPARSE = 0.04, 0.45  # shares of the time until which words are short and alone, and crowded
ROUNDED, DRAFTING = 0.65, 0.75  # shares of the time from which rounding, and drafts, are trained
CROWDED = 0.5, 0.15  # share of the batches with many words, before and after SPARSE
REPORT_S = 30.0


class Prompts:
    """Token ids around a picture."""

    def __init__(self, device: str, small: bool = False) -> None:
        """A tokenizer of its own."""
        self.tokenizer = seeing.make_tokenizer()
        self.config = seeing.config_of(self.tokenizer, small)
        self.device = device
        signs = ["Ġ" if each == " " else each for each in CHARACTERS]
        self.of_character = torch.tensor(
            list(map(self.tokenizer.token_to_id, signs)), device=device
        )
        self.newline = self.encode("\n")
        self.ids = cache(self._ids)
        self.angles = cache(self._angles)

    def encode(self, text: str) -> list[int]:
        """Token ids, without any around them."""
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def question(self, text: str) -> list[int]:
        """Token ids of a user's text, or of the end of one."""
        return self.encode(f" {text}" if text[0].isalpha() else text)

    def _ids(self, ids: tuple[int, ...]) -> Tensor:
        return torch.tensor(ids, device=self.device)

    def _angles(self, start: int, grid: tuple[int, int], length: int) -> Tensor:
        return seeing.text_angles(self.config, start, grid, length).to(self.device)

    def row(self, pieces: list[Piece], count: int) -> Tensor:
        """Token ids of pieces behind each other: [count, T]."""
        parts = [
            self.of_character[piece]
            if isinstance(piece, Tensor)
            else self.ids(tuple(piece)).expand(count, -1)
            for piece in pieces
        ]
        return torch.cat(parts, dim=1)


def sequence(prompts: Prompts, batch: Batch) -> tuple[Tensor, int, tuple[int, int], int]:
    """Token ids [B, T], where the picture begins, its grid of tokens, and the answer's length."""
    count, _, height, width = batch.pixels.shape
    grid = (height // SQUARE, width // SQUARE)
    before = prompts.encode("<|im_start|> user\n<|vision_start|>")
    pads = [prompts.config["image_token_id"]] * (grid[0] * grid[1])
    ends = prompts.encode("<|im_end|>")
    pieces: list[Piece] = [before, pads, prompts.encode("<|vision_end|>"), *batch.question]
    answer = prompts.row([*batch.answer, ends], count)
    ids = prompts.row([*pieces, ends, prompts.encode("\n<|im_start|> assistant\n")], count)
    return torch.cat((ids, answer), dim=1), len(before), grid, answer.shape[1]


def heads(generator: torch.Generator, hidden: int) -> Weights:
    """Weights of what is only trained along."""
    sizes = {CHARACTER_HEAD: SLOTS * CLASSES, PLACE_HEAD: SLOTS * MOST_PLACES}
    return {
        name: torch.randn(rows, hidden, generator=generator) * 0.02 for name, rows in sizes.items()
    }


def rounded(name: str, w: Tensor, levels: int) -> Tensor:
    """A matrix of the decoder as packed with so many levels each way."""
    packed = name.endswith("proj.weight") or "in_proj" in name or name == FUSED
    if name.startswith(VISUAL) or not packed:
        return w
    groups = w.view(len(w), -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-8) / levels
    return ((groups / scale).round().clamp(-levels - 1, levels) * scale).view_as(w)


@torch.no_grad()
def used(weights: Weights, dtype: torch.dtype, levels: int = 0) -> Weights:
    """Weights as a forward takes them; `levels` 0 leaves them."""
    return {
        name: (rounded(name, w, levels) if levels else w).to(
            torch.float32 if name.endswith(("A_log", "dt_bias")) else dtype
        )
        for name, w in weights.items()
    }


def answers(w: Weights, prompts: Prompts, batch: Batch) -> dict[str, Tensor]:
    """Forward of a batch: `tokens` of pictures, `x`, `hidden`, `ids`, and `logits` of answers."""
    ids, start, grid, length = sequence(prompts, batch)
    tokens = seeing.see(w, prompts.config, batch.pixels)
    embedded = functional.embedding(ids, w[EMBEDDING])
    stop = start + tokens.shape[1]
    x = torch.cat((embedded[:, :start], tokens, embedded[:, stop:]), dim=1)
    angles = prompts.angles(start, grid, ids.shape[1])
    hidden = seeing.decode(w, prompts.config, x, angles)
    logits = functional.linear(hidden[:, -length - 1 : -1], w[EMBEDDING])
    found = {"tokens": tokens, "x": x, "hidden": hidden, "ids": ids, "angles": angles}
    return found | {"logits": logits, "right": ids[:, -length:]}


def exact(found: dict[str, Tensor]) -> Tensor:
    """Tell which answers a greedy reader would give letter by letter: [B] bool."""
    return (found["logits"].argmax(-1) == found["right"]).all(1)


def loss_of(w: Weights, prompts: Prompts, batch: Batch, done: float) -> dict[str, Tensor]:
    """Parts of the loss, `total`, and the share of exact answers."""
    found = answers(w, prompts, batch)
    answer = functional.cross_entropy(
        found["logits"].flatten(0, 1).float(), found["right"].flatten()
    )
    logits = functional.linear(found["tokens"], w[CHARACTER_HEAD]).view(-1, CLASSES).float()
    weight = torch.ones(CLASSES, device=logits.device)
    weight[0] = BLANK
    letters = functional.cross_entropy(logits, batch.characters.flatten(), weight)
    logits = functional.linear(found["tokens"], w[PLACE_HEAD]).view(-1, MOST_PLACES).float()
    unlettered = torch.where(batch.characters > 0, batch.places, -100)
    places = functional.cross_entropy(logits, unlettered.flatten())
    along = 1.0 if done < 0.3 else 1.0 - 0.8 * (done - 0.3) / 0.7
    total = answer + along * (letters + 0.3 * places)
    parts = {"answer": answer, "letters": letters, "places": places}
    if done > DRAFTING:
        parts["draft"] = drafted(w, prompts.config, found)
        total = total + 0.5 * parts["draft"]
    return parts | {"total": total, "exact": exact(found).float().mean()}


def drafted(w: Weights, config: dict[str, Any], found: dict[str, Tensor]) -> Tensor:
    """Loss of the head for multi-token prediction; the trunk does not learn from it."""
    embedded, hidden = found["x"][:, 1:].detach(), found["hidden"][:, :-1].detach()
    out = seeing.draft(w, config, embedded, hidden, found["angles"][:-1])
    length = found["right"].shape[1]
    logits = functional.linear(out[:, -length:-1], w[EMBEDDING].detach())
    return functional.cross_entropy(logits.flatten(0, 1).float(), found["right"][:, 1:].flatten())


def orthogonal(m: Tensor) -> Tensor:
    """Matrices with the same directions and about equal strength in each: [n, rows, columns]."""
    tall = m.shape[1] > m.shape[2]
    x = m.to(torch.bfloat16 if m.is_cuda else torch.float32)
    x = x.transpose(1, 2) if tall else x
    x = x / (x.float().square().sum(dim=(1, 2), keepdim=True).sqrt().to(x.dtype) + 1e-7)
    for _ in range(5):
        a = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.transpose(1, 2) if tall else x


class Optimizer:
    """Muon for matrices of layers, AdamW for the rest."""

    def __init__(self, weights: Weights) -> None:
        """Momenta of zero."""
        self.groups: dict[tuple[bool, torch.Size], list[str]] = {}
        rest = []
        for name, w in weights.items():
            small = w.dim() != 2 or min(w.shape) < 16
            if small or "embed_tokens" in name or "pos_embed" in name or name.startswith("aux"):
                rest.append(w)
            else:
                self.groups.setdefault((name.startswith(MTP), w.shape), []).append(name)
        self.weights = weights
        self.momenta = {
            group: torch.stack([torch.zeros_like(weights[name]) for name in names])
            for group, names in self.groups.items()
        }
        fused = next(iter(weights.values())).is_cuda
        self.adam = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor | None], rate: float) -> None:
        """One step at a share of the peak; a weight without gradient stays."""
        for name, w in self.weights.items():
            gradient = gradients[name]
            w.grad = None if gradient is None else gradient.to(w.dtype)
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), 1.0)
        for group, names in self.groups.items():
            ws = [self.weights[name] for name in names]
            found = [w.grad for w in ws if w.grad is not None]
            if not found:
                continue  # the head that drafts, before it trains
            given = torch.stack(found)
            momentum = self.momenta[group].lerp_(given, 1 - MOMENTUM)
            update = orthogonal(given.lerp(momentum, MOMENTUM)).to(momentum.dtype)
            rows, columns = group[1]
            size = PEAK["matrices"] * rate * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(ws, 1 - 0.01 * PEAK["matrices"] * rate)
            torch._foreach_add_(ws, list(update.unbind()), alpha=-size)
        for settings in self.adam.param_groups:
            settings["lr"] = PEAK["rest"] * rate
        self.adam.step()


def learning_rate(done: float) -> float:
    """Share of the peak: a short rise, the peak, then down to a hundredth from half of the time."""
    if done < 0.015:
        return 0.05 + 0.95 * done / 0.015
    return 1.0 if done < 0.4 else max(0.01, 1 - (done - 0.4) / 0.6)


def held_out(path: Path, prompts: Prompts, most: int) -> Batch:
    """Pictures that Pillow drew, all with six letters or digits."""
    with numpy.load(path) as found:
        images, texts = torch.from_numpy(found["images"][:most]), found["texts"][:most].tolist()
    codes = torch.tensor([[CHARACTERS.index(c) for c in text] for text in texts])
    codes = codes.to(prompts.device)
    pixels = images.permute(0, 3, 1, 2).to(prompts.device).float() / 255
    question: list[Piece] = [prompts.question("What does it say?")]
    return Batch(pixels, question, [codes], codes, codes)


class Training:
    """Weights while they train, and the best of them."""

    def __init__(self, prompts: Prompts, painter: Painter, measured: Batch, plain: bool) -> None:
        """Random weights."""
        self.prompts, self.painter, self.measured = prompts, painter, measured
        self.plain = plain
        generator = torch.Generator().manual_seed(0)
        made = seeing.fresh(prompts.config, generator)
        made |= heads(generator, prompts.config["text_config"]["hidden_size"])
        self.weights = {n: w.to(prompts.device).requires_grad_() for n, w in made.items()}
        self.optimizer = Optimizer(self.weights)
        self.dtype = torch.bfloat16 if prompts.device == "cuda" else torch.float32
        self.steps, self.seconds, self.best = 0, 0.0, -1.0

    def step(self, count: int, done: float) -> dict[str, Tensor]:
        """One step on a fresh batch."""
        crowded = 0.0 if self.plain else CROWDED[done > SPARSE]
        batch = self.painter.batch(count, done < EASY, crowded, self.plain)
        levels = 7 if done > ROUNDED and self.steps % 2 else 0
        w = {
            n: v.detach().requires_grad_()
            for n, v in used(self.weights, self.dtype, levels).items()
        }
        parts = loss_of(w, self.prompts, batch, done)
        parts["total"].backward()  # type: ignore[no-untyped-call]
        self.optimizer.step({n: v.grad for n, v in w.items()}, learning_rate(done))
        self.steps += 1
        return parts

    @torch.no_grad()
    def read(self, batch: Batch) -> dict[str, int]:
        """Counts of exact answers, in BF16, and rounded to eight and four bits."""
        found = {}
        plain = {n: w.bfloat16().float() if n[0] == "m" else w for n, w in self.weights.items()}
        for name, levels in (("BF16", 0), ("INT8", 127), ("INT4", 7)):
            w = used(plain, self.dtype, levels)
            found[name] = int(exact(answers(w, self.prompts, batch)).sum())
        return found

    def report(self, parts: dict[str, Tensor], done: float, out: Path) -> None:
        """Print where it stands; save what reads best."""
        values = {name: round(float(part.detach()), 3) for name, part in parts.items()}
        if values["total"] != values["total"]:
            raise click.ClickException(f"the loss is no number at step {self.steps}")
        if self.plain:
            fresh = self.painter.batch(100, True, 0.0, plain=True)
            found, total = self.read(fresh), 100
        else:
            found, total = self.read(self.measured), len(self.measured.pixels)
        click.echo(
            f"{self.seconds:.0f} s, {100 * done:.0f} %, step {self.steps}: {values}; "
            f"unseen, exact of {total}: {found}"
        )
        score = min(found.values()) + 0.001 * done
        if score >= self.best:
            self.best = score
            self.save(out)

    def save(self, out: Path) -> None:
        """Write the checkpoint."""
        kept = {n: w for n, w in self.weights.items() if not n.startswith("aux")}
        seeing.save(kept, self.prompts.config, self.prompts.tokenizer, out)

    def run(self, count: int, minutes: float, out: Path) -> None:
        """Train to the end of a schedule of `minutes`."""
        begun = time.monotonic() - self.seconds
        reported = time.monotonic()
        while (done := self.seconds / (60 * minutes)) < 1:
            parts = self.step(count, done)
            self.seconds = time.monotonic() - begun
            if time.monotonic() - reported > REPORT_S or self.steps in (1, 20, 100):
                self.report(parts, done, out)
                reported = time.monotonic()
        self.report(parts, done, out)

    @torch.no_grad()
    def start_from(self, folder: Path, done: float, minutes: float) -> None:
        """Go on from a checkpoint at a share of the time; momenta begin anew."""
        for name, w in load_file(folder / "model.safetensors").items():
            self.weights[name].copy_(w.view_as(self.weights[name]))
        self.seconds = 60 * minutes * done


def tasks(training: Training, count: int) -> Iterator[tuple[str, int]]:
    """Kinds of questions, and how many of `count` fresh ones are answered exactly."""
    seen: dict[str, list[int]] = {}
    for _ in range(40):
        batch = training.painter.batch(count, easy=False)
        pieces = [piece for piece in batch.question if not isinstance(piece, Tensor)]
        name = training.prompts.tokenizer.decode([id for piece in pieces for id in piece])
        seen.setdefault(name, []).append(training.read(batch)["BF16"])
    for name, found in sorted(seen.items()):
        yield name, sum(found) // len(found)


@click.command()
@click.argument("drawn", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--minutes", default=8.0, show_default=True, help="Time of the whole training.")
@click.option("--start", type=click.Path(path_type=Path), help="Checkpoint to go on from.")
@click.option("--done", default=0.35, show_default=True, help="Share of the time it stands for.")
@click.option("--batch", default=1024, show_default=True, help="Pictures of a step.")
@click.option(
    "--plain", is_flag=True, help="Four letters in one font and size, to try it on a CPU."
)
def main(
    drawn: Path, out: Path, minutes: float, start: Path | None, done: float, batch: int, plain: bool
) -> None:
    """Train on letters that were DRAWN, into the folder OUT."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for each length
    prompts = Prompts(device, plain)
    letters = read_letters(
        drawn / "atlas.npz", device, 1 if plain else 1000, (12, 12) if plain else (1, 1000)
    )
    painter = Painter(letters, prompts.question, prompts.newline[0], seed=1 + (start is not None))
    training = Training(prompts, painter, held_out(drawn / "held_out.npz", prompts, 240), plain)
    if start:
        training.start_from(start, done, minutes)
    training.run(batch, minutes, out)
    if not plain:
        for name, found in tasks(training, 100):
            click.echo(f"{name} {found} of 100")


if __name__ == "__main__":
    main()
