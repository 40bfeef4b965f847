"""Try launch sizes of attention inside a model's whole decode step, on this GPU.

Run: python examples/tune_attention.py SIZE [POSITION ...]
SIZE is one that `make_random_checkpoint` knows. For each position what
`lowbit.runtime.kernels.launch` takes, then the fastest, each timed as the whole step, since beside
its neighbours attention behaves otherwise than alone. What wins is put into the rule by hand, with
the figures in `runtime/kernels/LOG.md`. Kernels compile one by one, some thirty a position.
"""

import itertools
import sys
from dataclasses import replace
from unittest import mock

import torch
import triton
from bench_models import CONTEXT, step_us
from make_random_checkpoint import HYBRID_SIZES, SIZES, config_of
from random_engine import random_engine

from lowbit.formats.architectures import read_config
from lowbit.runtime.bench.bench import GREEDY
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.kernels import attention_decode
from lowbit.runtime.kernels.device import multiprocessors
from lowbit.runtime.kernels.launch import (
    KEYS_OF_ONE,
    PART,
    STATIC_SHARED,
    AttentionLaunch,
    attention_launch,
    join_bytes,
)

SHOWN = 5
POSITIONS = (100, 1000, 8000, 32000)
OUT_OF_RESOURCES = (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError)


def candidates(rule: AttentionLaunch, reach: int, shared: int, D: int) -> list[AttentionLaunch]:
    """All keys by programs that share the columns, or keys in about as many splits as now."""
    found = []
    for warps, blocks, early in itertools.product((4, 8), (1, 2), (False, True)):
        if reach <= KEYS_OF_ONE:
            whole = AttentionLaunch(1, warps, blocks, early=early)
            for parts in (parts for parts in (1, 2, 4) if parts * PART <= D):
                ahead = reach <= 2 * whole.turn
                found.append(replace(whole, parts=parts, ahead=ahead))
        else:
            splits = (rule.splits // 2, rule.splits, 2 * rule.splits)
            found += [AttentionLaunch(n, warps, blocks, early=early) for n in splits if n > 1]
    return [c for c in found if join_bytes(shared, D, c.warps, c.parts) <= STATIC_SHARED]


def tried_us(engine: Engine, position: int, launch: AttentionLaunch) -> float:
    """A step that attends so; infinite where the kernel does not fit the GPU."""
    engine._graphs.clear()
    with mock.patch.object(attention_decode, "attention_launch", return_value=launch):
        try:
            return step_us(engine, position)
        except OUT_OF_RESOURCES as error:
            print(f"  {launch}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
            return float("inf")


def tune_attention(size: str, positions: list[int]) -> None:
    config, engine = read_config(config_of(size)), random_engine(size, 4, CONTEXT)
    engine.sampler.configure(GREEDY)
    Hkv, D = config.num_key_value_heads, config.head_dim
    shared = config.num_attention_heads // Hkv
    for position in positions:
        reach = engine.cache.reach_for(position + 1)
        rule = attention_launch(Hkv, shared, reach, D, multiprocessors(engine.token))
        tried = dict.fromkeys([rule, *candidates(rule, reach, shared, D)])
        times = {launch: tried_us(engine, position, launch) for launch in tried}
        print(f"{position} tokens:\n  {times[rule]:8.1f} us {rule}, the rule's")
        for launch in sorted(times, key=lambda each: times[each])[:SHOWN]:
            print(f"  {times[launch]:8.1f} us {launch}", flush=True)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("tune_attention needs an NVIDIA GPU")
    if len(sys.argv) < 2 or sys.argv[1] not in (*SIZES, *HYBRID_SIZES):
        raise SystemExit("usage: tune_attention.py SIZE [POSITION ...]")
    tune_attention(sys.argv[1], [int(each) for each in sys.argv[2:]] or list(POSITIONS))


if __name__ == "__main__":
    main()
