"""Decode speed of an 8B by how its bits are spread, at the same bytes, on this GPU.

    python examples/benchmarks/bench_bits.py
    python examples/benchmarks/bench_bits.py --ways

Random weights in five mixes of the same bytes: uniform INT4 in groups of 128 with an INT8 head; 4
and 8 bits in groups of 32, 64 and 128 as the costs of either of two models choose them; in groups
of 64 and 128; in groups of 128 alone.
Tokens per second of 1, 16 and 64 sequences together, 128 tokens after prompts of 64, medians of
three runs after the first, by exact inputs and by inputs in eight bits. The uniform mix comes again
at the end: the difference of its two rows is noise.

`--ways` needs no GPU: the kernels that an H200 takes for each mix, by their share of the bytes.
"""

import gc
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial

import click
import torch
from bench_engine import after_first, batch_rate
from make_random_checkpoint import config_of
from random_engine import engine_of

from lowbit.formats.activation_modes import ACTIVATIONS, Activations
from lowbit.formats.architectures import tensor_table
from lowbit.formats.architectures.names import split_layer
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.kernels.codec import CODECS, WIDE_CODECS
from lowbit.runtime.kernels.launch.card import H200
from lowbit.runtime.kernels.launch.choose import int8_variant, packed_variant
from lowbit.runtime.kernels.linear.program import packed
from lowbit.runtime.kernels.linear.tiles import TILE

SIZE = "8B"
BATCHES = (1, 16, 64)
CONTEXT = 512
HEAD = "lm_head"
SCHEMES = {
    "a": Scheme(4, 128), "b": Scheme(4, 64), "c": Scheme(4, 32),
    "A": Scheme(8, 128), "B": Scheme(8, 64), "C": Scheme(8, 32),
}  # fmt: skip
# A letter for each of the 36 layers. Chosen mixes have the least sum of costs at the bytes of the
# uniform one, as `--effort high` chooses. The cost of a linear is that of the same kind at the same
# relative depth in SmolLM2-135M, for `coder` in Qwen2.5-Coder-0.5B, estimated by `lowbit-convert
# sensitivity`. Coder's costs ask for small groups nearly everywhere.
MIXES = {
    "uniform": {
        "self_attn.qkv": 36 * "a", "self_attn.o_proj": 36 * "a",
        "mlp.gate_up": 36 * "a", "mlp.down_proj": 36 * "a", HEAD: "A",
    },
    "groups 32-128": {
        "self_attn.qkv": "acccAAcccAccccAAAAAAAAAAAcccAAcccccb",
        "self_attn.o_proj": "cb" + 20 * "a" + "b" + 13 * "a",
        "mlp.gate_up": "abbb" + 9 * "a" + 6 * "b" + 16 * "a" + "c",
        "mlp.down_proj": "cacc" + 9 * "a" + "A" + 20 * "a" + "bA", HEAD: "b",
    },
    "coder 32-128": {
        "self_attn.qkv": "aaabcccccbcccAAAAAAAAAccAAccccccAAAc",
        "self_attn.o_proj": "bbbbaabaabbbcbbcccccbcccbbbbbbbbcbbc",
        "mlp.gate_up": "aaaabbaaa" + 26 * "b" + "c",
        "mlp.down_proj": "baacccabbaaaaaaabbaaaaabbbaaabbbcbbc", HEAD: "c",
    },
    "groups 64-128": {
        "self_attn.qkv": "abbbAAbbAAbbbbAAAAAAAAAAAAbbAAbbbbbb",
        "self_attn.o_proj": "bb" + 34 * "a",
        "mlp.gate_up": "abbb" + 9 * "a" + 5 * "b" + 17 * "a" + "b",
        "mlp.down_proj": "babb" + 9 * "a" + "A" + 20 * "a" + "bA", HEAD: "b",
    },
    "groups of 128": {
        "self_attn.qkv": "aaaaAAAaAAaaaaAAAAAAAAAAAAaaAAaAaaaa",
        "self_attn.o_proj": "aA" + 34 * "a",
        "mlp.gate_up": 36 * "a",
        "mlp.down_proj": 13 * "a" + "A" + 21 * "a" + "A", HEAD: "a",
    },
}  # fmt: skip


def schemes_of(mix: str) -> dict[str, Scheme]:
    """Scheme of every linear of a mix, by module."""
    found = {}
    for spec in tensor_table(config_of(SIZE)):
        if spec.quantizable:
            name = split_layer(spec.fused_set or spec.module)
            letters = MIXES[mix][HEAD if name.layer is None else name.rest]
            found[spec.module] = SCHEMES[letters[name.layer or 0]]
    return found


def bytes_of(mix: str) -> int:
    """Bytes of codes and scales of a mix, all of which a step reads."""
    schemes = schemes_of(mix)
    shapes = {spec.module: spec.shape for spec in tensor_table(config_of(SIZE))}
    return sum(size_of(shapes[module], scheme) for module, scheme in schemes.items())


def size_of(shape: tuple[int, ...], scheme: Scheme) -> int:
    """Bytes of a linear: codes, and scales in BF16."""
    weights = math.prod(shape)
    return weights * scheme.bits // 8 + 2 * weights // (scheme.group_size or shape[-1])


def stacked(mix: str) -> Iterator[tuple[bool, tuple[int, int], Scheme]]:
    """Matrices of a mix as the runtime stacks them: whether gate and up or a head, [N, K]."""
    schemes = schemes_of(mix)
    rows: dict[str, int] = Counter()
    columns, own = {}, {}
    for spec in tensor_table(config_of(SIZE)):
        if spec.quantizable:
            name = spec.fused_set or spec.module
            rows[name] += spec.shape[0]
            columns[name], own[name] = spec.shape[1], schemes[spec.module]
    for name, N in rows.items():
        yield name.endswith("gate_up"), (N, columns[name]), own[name]


def ways_of(mix: str, activations: Activations, tokens: int) -> Mapping[str, float]:
    """Share of a mix's bytes that each kernel multiplies, and launches where it takes several."""
    found: Counter[str] = Counter()
    for paired, (N, K), scheme in stacked(mix):
        W = packed(K, scheme.group_size or K, scheme.bits, "bf16")
        codec = (WIDE_CODECS if activations == "int8" else CODECS)[scheme.bits]
        steps = -(-K // codec.STEP_K) * (codec.STEP_K // CODECS[scheme.bits].STEP_K)
        size = scheme.bits, N // TILE, steps, paired
        if activations == "int8":
            chosen = int8_variant(W, size, True, (), H200, (tokens, True))
        else:
            chosen = packed_variant(W, size, True, (), H200, (tokens, True, False, False))
        launches = -(-tokens // chosen.most)
        found[chosen.way + (f" x{launches}" if launches > 1 else "")] += size_of((N, K), scheme)
    whole = bytes_of(mix)
    return {way: size / whole for way, size in found.items()}


def print_ways() -> None:
    """Print the kernels of each mix."""
    for mix in MIXES:
        print(f"{mix}: {bytes_of(mix) / 1e6:,.0f} MB")
        for activations in ACTIVATIONS:
            for tokens in BATCHES:
                shares = ways_of(mix, activations, tokens).items()
                told = ", ".join(f"{way} {share:.0%}" for way, share in shares)
                print(f"  {activations:<6}{tokens:>3}  {told}")


def rates(mix: str, activations: Activations) -> list[float]:
    """Tokens per second of a mix, by the number of sequences."""
    config, count = config_of(SIZE), max(BATCHES)
    engine = engine_of(
        config, 4, "cuda", CONTEXT, count, activations=activations, schemes=schemes_of(mix)
    )
    found = [statistics.median(after_first(partial(batch_rate, engine, b))) for b in BATCHES]
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return found


@click.command()
@click.option("--ways", is_flag=True, help="Print the kernels of each mix, and measure nothing.")
@click.option("--only", type=click.Choice([*MIXES]), multiple=True, help="Mixes beside the first.")
@click.option("--activations", type=click.Choice(ACTIVATIONS), multiple=True, default=ACTIVATIONS)
def main(ways: bool, only: tuple[str, ...], activations: tuple[Activations, ...]) -> None:
    """Time the decoding of all mixes."""
    if ways:
        print_ways()
        return
    if not torch.cuda.is_available():
        raise click.ClickException("bench_bits needs an NVIDIA GPU; --ways needs none")
    uniform, *others = MIXES
    print(f"{torch.cuda.get_device_name()}, {SIZE}, tok/s of so many sequences together")
    print(f"{'':<16}{'MB':>7}{'inputs':>8}" + "".join(f"{count:>16}" for count in BATCHES))
    for inputs in activations:
        base: list[float] = []
        for mix in (uniform, *(mix for mix in others if not only or mix in only), uniform):
            own = rates(mix, inputs)
            base = base or own
            pairs = zip(own, base, strict=True)
            cells = (f"{rate:,.0f} ({rate / first - 1:+.1%})" for rate, first in pairs)
            line = f"{mix:<16}{bytes_of(mix) / 1e6:>7,.0f}{inputs:>8}"
            print(line + "".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
