"""Mean KL that each part of a packed model adds alone, and that it saves as the original's.

    python examples/benchmarks/real_models.py smollm2-135m-instruct models/smollm2
    lowbit-convert models/smollm2 models/smollm2-int4
    python examples/benchmarks/leaks_by_kind.py models/smollm2 models/smollm2-int4

Parts are the embedding, the head, every kind of fused set in all layers, the first and the last two
layers, and every layer. `KL alone` is that of the original with the part packed, `KL saved` how
much less the packed folder has with the part left as in the original. By round-to-nearest both are
about the same and sum to the whole's KL, the last row. GPTQ chooses codes that make up for errors
of earlier parts: alone they correct what is not there, and a part left as it was no longer corrects
others, so that it may save less than nothing. `lowbit-convert sensitivity` has costs that add up.

KL is KL(original || variant) in nats a token; ± is the standard error over windows, spread over the
report's own WikiText unless --text names another file.

The original of a rotated folder is rotated, too, in FP32: its logits are the same, and its weights
are in the basis of the packed ones.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
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
    """A part's loss, in nats a token; errors are None below 8 windows."""

    part: str
    size_bytes: int  # of its tensors in the packed folder
    kl: float  # of the part alone
    kl_error: float | None
    saved: float  # less KL of the whole folder, where the part stays the original's
    saved_error: float | None  # paired by windows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", type=Path, help="folder of the original")
    add("packed", type=Path, help="folder made from it")
    add("--text", type=Path, metavar="FILE", help="default: the report's WikiText")
    add("--windows", type=int, default=10, help="of 512 tokens")
    add("--parts", default="*", metavar="PATTERN", help="to measure, as in '[!l]*'; default: all")
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
    variants: Sequence[Takes],
    windows: Tensor,
    device: torch.device,
    pool: Pool,
    advance: Callable[[int], None],
) -> list[Tensor]:
    """Inputs of the head in every variant: [windows * (T - 1), h] each.

    As long as a variant is the original, or the whole packed model, it shares its states.

    Args:
        models: original and packed.
        variants: the original and the packed model first.
    """
    original, packed = models
    bases = [embed(model, windows, device) for model in models]
    states = [bases[takes(packed.embedding)] for takes in variants]
    for number in range(len(original.layers)):
        layers = [load_layer(model, number, device) for model in models]
        names = set(layers[0].module.state_dict())
        prefix = f"{original.prefix}layers.{number}."
        taken = [{name for name in names if takes(f"{prefix}{name}")} for takes in variants]
        for place, own in enumerate(taken):
            unchanged = not own if states[place] is bases[0] else own == names
            shared = any(states[place] is base for base in bases)
            if shared and unchanged:
                continue
            if shared:
                states[place] = states[place].clone()
            pass_through(mixed(original, number, layers, own), states[place], device, pool)
        for base, layer in zip(bases, layers, strict=True):
            pass_through(layer, base, device, pool)
        advance(1)
    norm = f"{original.prefix}norm.weight"
    finals = [scored_states(model, base.clone()) for model, base in zip(models, bases, strict=True)]
    return [
        finals[[base is each for base in bases].index(True)]
        if any(base is each for base in bases)
        else scored_states(models[takes(norm)], each)
        for each, takes in zip(states, variants, strict=True)
    ]


def mixed(model: LayeredModel, number: int, layers: Sequence[Layer], taken: Iterable[str]) -> Layer:
    """A layer of the original, the first, with some weights of the packed one, the second."""
    own, packed = (layer.module.state_dict() for layer in layers)
    module = copy.deepcopy(model.layers[number]).requires_grad_(False)
    module.load_state_dict({**own, **{name: packed[name] for name in taken}}, assign=True)
    return Layer(module, layers[0].arguments)


def divergences(
    models: tuple[LayeredModel, LayeredModel],
    variants: Sequence[Takes],
    states: Sequence[Tensor],
    windows: int,
    pool: Pool,
) -> Tensor:
    """Mean KL from the original, the first variant, by window and variant: [windows, variants]."""
    original, packed = models
    own = states[0]
    scored = len(own) // windows
    log_z = log_partition(original, own, pool).to(torch.float32)
    sums = [Divergences(len(variants), scored, own.device) for _ in range(windows)]
    every = slice(0, scored)
    heads = (model.weights.rows(model.head, HEAD_ROWS, own.device) for model in models)
    for (_, rows), (_, packed_rows) in zip(*heads, strict=True):

        def add(window: int, rows: Tensor = rows, packed_rows: Tensor = packed_rows) -> None:
            here = slice(window * scored, (window + 1) * scored)
            p = (own[here] @ rows.T).sub_(log_z[here, None]).exp_()
            error = packed_rows - rows
            for number, (takes, x) in enumerate(zip(variants, states, strict=True)):
                # Less cancels in the product of a difference than in one of two products.
                d = (x[here] - own[here]) @ rows.T
                if takes(packed.head):
                    d += x[here] @ error.T
                sums[window].add(number, every, p, d)

        for_each(pool, add, range(windows))
    return torch.tensor([own_sums.means() for own_sums in sums], dtype=torch.float64)


def measure(options: argparse.Namespace) -> list[Leak]:
    """The loss of every part, the whole last."""
    pair, device = open_pair(options.source, options.packed), open_device(options.device)
    text = options.text.read_text(encoding="utf-8") if options.text else default_texts()[0].content
    ids = load_text_tokenizer(options.source, "the windows").encode(text)
    windows = cut_samples(ids, WINDOW, options.windows)
    with torch.inference_mode(), without_advice(), progress_bars() as progress:
        models = (
            load_layered_model(pair.original, WINDOW, device),
            load_layered_model(pair.packed, WINDOW, device),
        )
        *parts, whole = parts_of(pair, models[1])
        parts = [part for part in parts if fnmatchcase(part.name, options.parts)]
        done, count = 0, len(models[0].layers)

        def advance(steps: int) -> None:
            nonlocal done
            done += steps
            progress("logits", done, count)

        alone = [part.takes for part in parts]
        variants: list[Takes] = [takes_none, whole.takes, *alone]
        variants += [partial(but, takes) for takes in alone]
        with alone_on_threads(device) as pool:
            states = states_of(models, variants, windows, device, pool, advance)
            _, all_kl, *kl = divergences(models, variants, states, len(windows), pool).T
    rows = zip(parts, kl[: len(parts)], kl[len(parts) :], strict=True)
    leaks = [leak(pair, part, own, all_kl - rest) for part, own, rest in rows]
    return [*leaks, leak(pair, whole, all_kl, all_kl)]


def takes_none(_: str) -> bool:
    """The original."""
    return False


def but(takes: Takes, name: str) -> bool:
    """The packed model without a part."""
    return not takes(name)


def leak(pair: Pair, part: Part, kl: Tensor, saved: Tensor) -> Leak:
    """A part's loss from figures by window."""
    size = size_of(pair, part)
    return Leak(
        part.name, size, float(kl.mean()), mean_error(kl), float(saved.mean()), mean_error(saved)
    )


def show(title: str, leaks: Sequence[Leak]) -> None:
    """Print a table whose bars are what parts save."""
    whole = leaks[-1]
    widest = max((leak.saved for leak in leaks[:-1]), default=0.0)
    figures = ("MB", "of bytes", "KL alone", "±", "of KL", "KL saved", "±", "of KL")
    table = plain_table(title, ("part",), figures)
    table.add_column("")
    for leak in leaks:
        cells = []
        for value, error in ((leak.kl, leak.kl_error), (leak.saved, leak.saved_error)):
            shown = "" if error is None else f"{error:.1g}"
            cells += [f"{value:.5f}", shown, f"{value / whole.kl:.1%}" if whole.kl else ""]
        bar = Bar(widest, 0, max(0.0, leak.saved), width=20) if widest > 0 else ""
        table.add_row(
            leak.part,
            f"{leak.size_bytes / 1e6:.2f}",
            f"{leak.size_bytes / whole.size_bytes:.1%}",
            *cells,
            "" if leak is whole else bar,
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
