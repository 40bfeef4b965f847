"""Exchanges of the ranks of a model: each has the other's at its side, whatever the step.

The steps are sent to GPUs that are not there, in a process of its own, since Triton knows one
driver.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from tests.drafters import LILICORR, write_drafter
from tests.runtime.launched_kinds import listed_by
from tests.short_models import Shorten

pytestmark = pytest.mark.kernels

RANKS = 2
PLAIN = (1, 2, 4, 16, 96)  # tokens
ROUNDS = [(1, 1), (1, 3), (1, 7), (2, 1), (2, 3), (3, 3), (4, 3)]  # sequences, and drafts of each
EXCHANGES = ("_exchange_sum", "_exchange_columns", "_exchange_first", "_sum_pushed")


@pytest.fixture(scope="module")
def launches(shorten: Shorten, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Those of both ranks with the model's head, and with a drafter."""
    drafter, own = tmp_path_factory.mktemp("drafter"), LILICORR["dflash_config"]
    section = own | {"target_layer_ids": [0]}
    write_drafter(drafter, base=LILICORR, num_target_layers=2, dflash_config=section)
    module = "tests.runtime.engine.parallel.test_rank_launches"
    found: list[Any] = listed_by(module, shorten("tiny-qwen3.5"), drafter)
    return found


@pytest.mark.parametrize("drafter", [False, True], ids=["head", "drafter"])
def test_ranks_exchange_the_same_in_the_same_order(launches: list[Any], drafter: bool) -> None:
    """Rank 0 alone drafts between: that exchanges nothing, and rank 1 launches none of it."""
    first, other = launches[drafter]
    assert len(first) == len(other) > len(PLAIN) + 2 * len(ROUNDS)
    for (step, launches), (same, theirs) in zip(first, other, strict=True):
        assert step == same
        ours = [each for each in launches if each[0] != "other"]
        assert ours == [each for each in theirs if each[0] != "other"], step
        assert any(name == "_exchange_columns_kernel" for name, _ in ours) or "chunk" in step
        if "tokens" in step or "drafts" in step:
            _check_that_numbers_come_first(launches)
            _check_that_numbers_come_first(theirs)
    made = [len(launches) for step, launches in first if "made" in step]
    ngram = [len(launches) for step, launches in first if "ngram" in step]
    assert all(more > less for more, less in zip(made, ngram, strict=True))
    assert [len(launches) for step, launches in other if "made" in step] == [
        len(launches) for step, launches in other if "ngram" in step
    ]


def _check_that_numbers_come_first(launches: list[Any]) -> None:
    """Numbers of a step are shared before it, and the kernel behind waits before all else."""
    names = [name if name != "other" else what for name, what in launches]
    at = names.index("_exchange_first_kernel")
    assert names[at + 1] == "_embed_kernel"
    assert not any(name.startswith(EXCHANGES) for name in names[:at])


def launches_of(folder: Path, rank: int, drafter: Path | None) -> list[tuple[str, list[Any]]]:
    """Launches of a rank on an H200 by steps: exchanges with all their numbers, and others.

    drafter: that the first rank has beside the model; None for the model's head.
    """
    from lowbit.runtime.engine.draft import block, made
    from lowbit.runtime.engine.draft.block import BlockRounds
    from lowbit.runtime.engine.draft.mtp import new_mtp_rounds
    from lowbit.runtime.engine.draft.verify import Verifier
    from lowbit.runtime.engine.runner import Runner
    from lowbit.runtime.kernels.launch.card import H200
    from lowbit.runtime.lab import fake_gpu

    seen: list[Any] = []

    def record(kernel: Any, grid: Any, arguments: Any, named: Any) -> None:
        name, plan = kernel.__name__, named.get("PLAN")
        numbers = [each for each in arguments if isinstance(each, int)]
        if name.startswith(EXCHANGES):
            widths = getattr(plan, "WIDTHS", ())
            strides = numbers[:2] if name == "_exchange_first_kernel" else numbers
            seen.append((name, [*grid, *strides, *widths]))
        elif getattr(plan, "RANKS", 0):
            seen.append((name, numbers))
        else:
            seen.append(("other", name))

    def launched() -> list[Any]:
        found = list(seen)
        seen.clear()
        return found

    fake_gpu.fake_gpu(H200, record)
    runner = runner_of(folder, rank, drafter)
    for module in (made, block):
        vars(module)["new_ring"] = lambda rows, pinned: runner.inputs.right
    with mock.patch.object(Runner, "on_gpu", property(lambda runner: True)):
        rounds: Any = new_mtp_rounds(Verifier(runner))
        if runner.blocks is not None:
            rounds = BlockRounds(Verifier(runner), runner.blocks)
        assert (rounds is None) == (rank > 0)
        return list(steps_of(runner, rounds, launched))


def runner_of(folder: Path, rank: int, drafter: Path | None) -> Any:
    """The runner of a rank, of tensors without data."""
    import torch

    from lowbit.formats.kv_cache import BF16_CACHE
    from lowbit.runtime.backends import cuda, cuda_parallel
    from lowbit.runtime.engine.load_options import LoadOptions
    from lowbit.runtime.engine.new_runner import new_runner
    from lowbit.runtime.engine.parallel.link import GpuLink
    from lowbit.runtime.kernels import exchange
    from lowbit.runtime.kernels.ptx.peers import Peers
    from lowbit.runtime.lab.fake_gpu import MetaWeights, meta_blocks
    from lowbit.runtime.models.loader import build_decoder, open_model, with_drafter
    from lowbit.runtime.models.lone_head import lone_trunk, with_lone_head
    from lowbit.runtime.models.shards import head_rows, shard_of
    from lowbit.runtime.state.device_state import CacheSize
    from lowbit.runtime.weights.share import Share

    def meta(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(count, dtype=dtype, device="meta")

    share = Share(rank, RANKS)
    opened = open_model(folder, "int4", 64, head=drafter is None)
    opened = opened if drafter is None else with_drafter(opened, drafter)
    shard = shard_of(opened, share)
    rows = tuple(head_rows(shard.config.vocab_size, Share(each, RANKS)) for each in range(RANKS))
    words = exchange.buffer_words(RANKS)
    memory = meta(words, torch.int64), meta(RANKS, torch.int64), meta(1), meta(1), meta(1)
    peers = Peers(share, *memory, 8 * words, 1024 * shard.config.hidden_size, meta(1))

    def formed(module: str, form: Any) -> Any:
        return cuda_parallel.rank_form(module, form, share, rows)

    on_meta = "meta", torch.bfloat16
    weights = MetaWeights(
        *(shard.checkpoint, shard.schemes, *on_meta, cuda_parallel.prepare),
        gather=cuda_parallel.gathered,
        formed=formed,
    )
    zeros = torch.zeros(0, shard.config.hidden_size, device="meta")
    decoder: Any = build_decoder(shard, weights, cuda_parallel.RankOps(peers, zeros), 600)
    lone = shard.lone
    if lone is not None:
        own = lone.checkpoint, lone.schemes, *on_meta, cuda.prepare
        whole = MetaWeights(*own, gather=cuda.gathered), cuda
        trunk = lone_trunk(decoder, lone, *whole)
        decoder = decoder if shard.drafter else with_lone_head(decoder, lone, *whole)
    size = CacheSize(context=600, sequences=96, pages=40, snapshots=0, drafts=12)
    runner = new_runner(decoder, 4000, size, torch.bfloat16, "meta", BF16_CACHE)
    runner.link = GpuLink(partial(exchange.exchange_first, peers=peers))
    if shard.drafter is not None:
        runner.blocks = replace(meta_blocks(opened, LoadOptions(), runner), target=trunk)
    return runner


def steps_of(
    runner: Any, rounds: Any, launched: Callable[[], list[Any]]
) -> Iterator[tuple[str, list[Any]]]:
    """Steps by name, with their launches; rounds: of drafts, on the rank that makes them."""
    import torch

    from lowbit.runtime.engine.chunks import Chunks
    from lowbit.runtime.engine.draft.verify import Part
    from lowbit.runtime.engine.graphs import Graphs, longest_for, width_for
    from lowbit.runtime.engine.request import Request
    from lowbit.runtime.engine.sequence import Sequence
    from lowbit.runtime.state.step import Ending, Span, StepPlan

    first, drafts_by_head = rounds is not None, hasattr(rounds, "_seen")
    sequence = Sequence(Request((1,)), count=1, seed=0, row=1, length=1)
    sequence.output.append(1)
    run = runner.run_step if first else runner.run_unchosen
    for M in PLAIN:
        run(StepPlan(M, M, 256, longest=1))
        yield f"{M} tokens", launched()
    for B, k in ROUNDS:
        M = width_for(B * (k + 1))
        run(StepPlan(M, B + 1, 256, longest=longest_for(k + 1), drafts=True))
        yield f"ngram {B} x {k} drafts", launched()
    for B, k in ROUNDS:
        M = width_for(B * (k + 1))
        if first:
            rounds.parts = [Part(sequence, (0,) * k, (1,) * (1 + k))] * B
            if drafts_by_head:
                rounds._seen = [Span(1, 0, 1 + k)] * B
            rounds.round(M, B, k, 256, ordered=False)
        else:  # by the plan that the first rank sends
            padded = B + (B * (k + 1) < M)
            runner.run_unchosen(StepPlan(M, padded, 256, longest=k + 1, drafts=True))
        yield f"made {B} x {k} drafts", launched()
    chunks = Chunks(runner.decoder, runner.each_layer, runner.tables, Graphs(), longer=True)
    endings: list[tuple[int, Ending]] = [(64, "last"), (64, "apart"), (12, "together")]
    for tokens, ending in endings:
        plan = StepPlan(tokens, 1, 256, tokens, prompt=tokens > 16, ending=ending)
        chunks.forward(chunks.padded(plan), runner.shifts)
        yield f"chunk of {tokens}, {ending}", launched()
        many = replace(plan, sequences=2)
        chunks.forward(chunks.padded(many), runner.shifts)
        yield f"chunk of {tokens} of two prompts, {ending}", launched()
    hidden = torch.empty(1, runner.decoder.config.hidden_size, dtype=torch.bfloat16, device="meta")
    runner.run_head(hidden)
    yield "head", launched()


if __name__ == "__main__":
    model, own = map(Path, sys.argv[1:])
    both = [[launches_of(model, rank, each) for rank in range(RANKS)] for each in (None, own)]
    json.dump(both, sys.stdout)
    sys.stdout.flush()
    os._exit(0)
