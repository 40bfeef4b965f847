"""Mean KL that each part of a packed model adds alone, all its other weights being the original's.

    python examples/benchmarks/real_models.py smollm2-135m-instruct models/smollm2
    lowbit-convert models/smollm2 models/smollm2-int4
    python examples/benchmarks/leaks_by_kind.py models/smollm2 models/smollm2-int4

Parts are the embedding, the head, every kind of fused set in all layers, the first and the last two
layers, and every layer. Their KL adds up to about that of the whole, the last row. `of KL` and
`of bytes` are shares of the whole's: a part whose first share is far above its second would gain
most by more bits. KL is KL(original || part packed) in nats a token; ± is its standard error over
windows, spread over the report's own WikiText unless --text names another file.

The original of a rotated folder is rotated, too, in FP32: its logits are the same, and its weights
are in the basis of the packed ones.
"""

import argparse
import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.bar import Bar
from torch import Tensor

from lowbit.convert.cli.progress import progress_bars
from lowbit.convert.measure.pair import Pair, open_pair
from lowbit.convert.measure.uncertainty import mean_error
from lowbit.convert.original.device import open_device
from lowbit.convert.original.divergence import Divergences, log_partition
from lowbit.convert.original.layer import Layer
from lowbit.convert.original.model import LayeredModel, load_layered_model
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.threads import Pool, alone_on_threads, for_each
from lowbit.convert.original.walk import HEAD_ROWS, embed, load_layer, pass_through, scored_states
from lowbit.convert.plan.sets import fused_sets
from lowbit.convert.texts.calibration import cut_samples
from lowbit.convert.texts.evaluation import WINDOW, default_texts
from lowbit.formats.shell.tables import plain_table, results
from lowbit.formats.text.tokenizer import load_text_tokenizer

ENDS = 2  # layers that are taken together, at each end
WHOLE = "all"

Takes = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Part:
    """Weights that are taken from the packed folder."""

    name: str
    takes: Takes  # told the name of a weight as in the original


@dataclass(frozen=True, slots=True)
class Leak:
    """A part's loss."""

    part: str
    size_bytes: int  # of its tensors in the packed folder
    kl: float  # nats a token
    kl_error: float | None  # None below 8 windows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", type=Path, help="folder of the original")
    add("packed", type=Path, help="folder made from it")
    add("--text", type=Path, metavar="FILE", help="default: the report's WikiText")
    add("--windows", type=int, default=10, help="of 512 tokens")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser.parse_args()


def parts_of(pair: Pair, model: LayeredModel) -> list[Part]:
    """All parts of a packed model, the whole last."""
    checkpoint = pair.original.checkpoint
    kinds: dict[str, set[str]] = {}
    for fused in fused_sets(checkpoint.config, checkpoint.tensors):
        if fused.layer is not None:
            weights = (f"{module}.weight" for module in fused.modules)
            kinds.setdefault(fused.kind, set()).update(weights)
    count = len(model.layers)
    ends = {
        f"first {ENDS} layers": range(ENDS),
        f"last {ENDS} layers": range(count - ENDS, count),
        **{f"layer {number}": range(number, number + 1) for number in range(count)},
    }
    parts = [Part("embedding", model.embedding.__eq__), Part("head", model.head.__eq__)]
    if model.head == model.embedding:
        parts = [Part("embedding and head", model.head.__eq__)]
    parts += [Part(kind, weights.__contains__) for kind, weights in kinds.items()]
    prefix = f"{model.prefix}layers."
    for name, layers in ends.items():
        starts = tuple(f"{prefix}{number}." for number in layers)
        parts.append(Part(name, partial(begins, starts)))
    return [*parts, Part(WHOLE, lambda _: True)]


def begins(starts: tuple[str, ...], name: str) -> bool:
    """Tell if a name begins with one of some words."""
    return name.startswith(starts)


def size_of(pair: Pair, part: Part) -> int:
    """Bytes of a part's tensors in the packed folder."""

    def weight(name: str) -> str:
        module, _, suffix = name.rpartition(".")
        return f"{module}.weight" if suffix.startswith("weight_") else name

    tensors = pair.packed.checkpoint.tensors.values()
    return sum(info.nbytes for info in tensors if part.takes(weight(info.name)))


def states_of(
    models: tuple[LayeredModel, LayeredModel],
    parts: Sequence[Part],
    windows: Tensor,
    device: torch.device,
    pool: Pool,
    advance: Callable[[int], None],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Inputs of the head in the original, and in each part's model where they are others.

    Args:
        models: original and packed.

    Returns:
        [windows * (T - 1), h] each.
    """
    original, packed = models
    own, states = embed(original, windows, device), {}
    for part in parts:
        if part.takes(packed.embedding):
            states[part.name] = embed(packed, windows, device)
    for number in range(len(original.layers)):
        layers = tuple(load_layer(model, number, device) for model in models)
        names = list(layers[0].module.state_dict())
        prefix = f"{original.prefix}layers.{number}."
        for part in parts:
            taken = {name for name in names if part.takes(f"{prefix}{name}")}
            if not taken and part.name not in states:
                continue
            hidden = states.setdefault(part.name, own.clone())
            pass_through(mixed(original, number, layers, taken), hidden, device, pool)
        pass_through(layers[0], own, device, pool)
        advance(1)
    norm = f"{original.prefix}norm.weight"
    return scored_states(original, own), {
        part.name: scored_states(packed if part.takes(norm) else original, states[part.name])
        for part in parts
        if part.name in states
    }


def mixed(
    model: LayeredModel, number: int, layers: tuple[Layer, ...], taken: Iterable[str]
) -> Layer:
    """A layer of the original, the first, with some weights of the packed one, the second."""
    own, packed = (layer.module.state_dict() for layer in layers)
    module = copy.deepcopy(model.layers[number]).requires_grad_(False)
    module.load_state_dict({**own, **{name: packed[name] for name in taken}}, assign=True)
    return Layer(module, layers[0].arguments)


def divergences(
    models: tuple[LayeredModel, LayeredModel],
    parts: Sequence[Part],
    own: Tensor,
    states: Mapping[str, Tensor],
    windows: int,
    pool: Pool,
) -> Tensor:
    """Mean KL from the original by window and part: [windows, parts]."""
    original, packed = models
    scored = len(own) // windows
    log_z = log_partition(original, own, pool).to(torch.float32)
    sums = [Divergences(len(parts), scored, own.device) for _ in range(windows)]
    every = slice(0, scored)
    heads = (model.weights.rows(model.head, HEAD_ROWS, own.device) for model in models)
    for (_, rows), (_, packed_rows) in zip(*heads, strict=True):

        def add(window: int, rows: Tensor = rows, packed_rows: Tensor = packed_rows) -> None:
            here = slice(window * scored, (window + 1) * scored)
            logits = own[here] @ rows.T
            p = (logits - log_z[here, None]).exp_()
            for number, part in enumerate(parts):
                x = states.get(part.name, own)[here]
                takes = part.takes(packed.head)
                if not takes and part.name not in states:
                    continue  # this part changes nothing that the model reads
                # Less cancels in the product of a difference than in one of two products.
                d = (x - own[here]) @ rows.T
                d += x @ (packed_rows - rows).T if takes else 0.0
                sums[window].add(number, every, p, d)

        for_each(pool, add, range(windows))
    return torch.tensor([own_sums.means() for own_sums in sums], dtype=torch.float64)


def measure(options: argparse.Namespace) -> list[Leak]:
    """The loss of every part."""
    pair, device = open_pair(options.source, options.packed), open_device(options.device)
    text = options.text.read_text(encoding="utf-8") if options.text else default_texts()[0].content
    ids = load_text_tokenizer(options.source, "the windows").encode(text)
    windows = cut_samples(ids, WINDOW, options.windows)
    with torch.inference_mode(), without_advice(), progress_bars() as progress:
        models = (
            load_layered_model(pair.original, WINDOW, device),
            load_layered_model(pair.packed, WINDOW, device),
        )
        parts = parts_of(pair, models[1])
        done, count = 0, len(models[0].layers)

        def advance(steps: int) -> None:
            nonlocal done
            done += steps
            progress("logits", done, count)

        with alone_on_threads(device) as pool:
            own, states = states_of(models, parts, windows, device, pool, advance)
            kl = divergences(models, parts, own, states, len(windows), pool)
    return [
        Leak(part.name, size_of(pair, part), float(mean), mean_error(column))
        for part, mean, column in zip(parts, kl.mean(0), kl.T, strict=True)
    ]


def show(title: str, leaks: Sequence[Leak]) -> None:
    """Print a table whose bars are the shares of the KL."""
    whole = leaks[-1]
    widest = max(leak.kl for leak in leaks[:-1])
    table = plain_table(title, ("part",), ("MB", "of bytes", "KL", "±", "of KL"))
    table.add_column("")
    for leak in leaks:
        error = "" if leak.kl_error is None else f"{leak.kl_error:.1g}"
        table.add_row(
            leak.part,
            f"{leak.size_bytes / 1e6:.2f}",
            f"{leak.size_bytes / whole.size_bytes:.1%}",
            f"{leak.kl:.5f}",
            error,
            f"{leak.kl / whole.kl:.1%}" if whole.kl else "",
            "" if leak is whole else Bar(widest or math.inf, 0, leak.kl, width=24),
        )
    results().print(table)


def main() -> None:
    options = parse()
    leaks = measure(options)
    show(options.packed.name, leaks)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(leak) for leak in leaks], indent=1) + "\n")


if __name__ == "__main__":
    main()
