"""Try launch sizes of attention inside a model's whole decode step, on this GPU.

Run: python examples/maintenance/tune_attention.py SIZE [POSITION ...]
SIZE is one that `make_random_checkpoint` knows. For each position what
`kernels.launch` takes, then the fastest, each timed as the whole step, since beside its
neighbours attention behaves otherwise than alone. What wins is put into the rule by hand, with
the figures in `runtime/kernels/LOG.md`; the order of keys decides the bits of every result, so one
order must do for all positions. Kernels compile one by one, some thirty a position.
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import click
import torch
import triton

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from bench_models import CONTEXT, step_us
from make_random_checkpoint import HYBRID_SIZES, SIZES, config_of
from random_engine import random_engine

from lowbit.formats.architectures import read_config
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.graphs import Graphs, round_kv_len
from lowbit.runtime.kernels.attention import decode as attention_decode
from lowbit.runtime.kernels.launch.attention import (
    PART,
    REGISTERS,
    AttentionLaunch,
    attention_launch,
    join_bytes,
)
from lowbit.runtime.kernels.launch.device import STATIC_SHARED
from lowbit.runtime.thresholds import SEQUENCE_TOKENS

SHOWN = 5
POSITIONS = (100, 1000, 8000, 32000)
OUT_OF_RESOURCES = (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError)


def candidates(rule: AttentionLaunch, reach: int, shared: int, D: int) -> list[AttentionLaunch]:
    """Launches around the rule's: other orders of keys, and other programs for each order."""
    found = []
    for warps, blocks, early in itertools.product((4, 8), (1, 2), (False, True)):
        keys = replace(rule.keys, warps=warps, blocks=blocks, groups=8 // warps)
        if rule.splits == 1:
            turns = keys.whole // (keys.turn * keys.groups)
            for parts in (parts for parts in (1, 2, 4) if parts * PART <= D):
                ahead = turns if turns <= 4 and D // parts <= PART else 0
                found.append(AttentionLaunch(keys, 1, parts, ahead, early))
        else:
            for most in (keys.most // 2, keys.most, 2 * keys.most):
                split = replace(keys, most=most)
                launch = AttentionLaunch(split, min(-(-reach // keys.turn), most), early=early)
                found += [launch, replace(launch, registers=REGISTERS)]
    return [launch for launch in found if fits(launch, shared, D)]


def fits(launch: AttentionLaunch, shared: int, D: int) -> bool:
    """True where a program's shared memory can be declared."""
    warps = launch.keys.warps * (launch.keys.groups if launch.splits == 1 else 1)
    return join_bytes(shared, D, warps, launch.parts, SEQUENCE_TOKENS) <= STATIC_SHARED


def tried_us(engine: Engine, position: int, launch: AttentionLaunch) -> float:
    """A step that attends so; infinite where the kernel does not fit the GPU."""
    engine.runner.graphs = Graphs()
    with mock.patch.object(attention_decode, "attention_launch", return_value=launch):
        try:
            return step_us(engine, position)
        except OUT_OF_RESOURCES as error:
            print(f"  {launch}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
            return float("inf")


def tune_attention(size: str, positions: list[int]) -> None:
    config, engine = read_config(config_of(size)), random_engine(size, 4, CONTEXT)
    Hkv, D = config.num_key_value_heads, config.head_dim
    shared = config.num_attention_heads // Hkv
    for position in positions:
        reach = round_kv_len(position + 1, engine.limits.context)
        rule = attention_launch(Hkv, shared, D, reach, tokens=1)
        tried = dict.fromkeys([rule, *candidates(rule, reach, shared, D)])
        times = {launch: tried_us(engine, position, launch) for launch in tried}
        print(f"{position} tokens:\n  {times[rule]:8.1f} us {rule}, the rule's")
        for launch in sorted(times, key=lambda each: times[each])[:SHOWN]:
            print(f"  {times[launch]:8.1f} us {launch}", flush=True)


@click.command()
@click.argument("size", type=click.Choice([*SIZES, *HYBRID_SIZES]), metavar="SIZE", required=False)
@click.argument("positions", nargs=-1, type=int)
def main(size: str | None, positions: tuple[int, ...]) -> None:
    """Print the fastest launches of attention after POSITIONS tokens."""
    if not torch.cuda.is_available():
        raise SystemExit("tune_attention needs an NVIDIA GPU")
    if size is None:
        raise click.UsageError("SIZE is missing")
    tune_attention(size, list(positions or POSITIONS))


if __name__ == "__main__":
    main()
