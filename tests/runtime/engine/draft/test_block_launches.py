"""Rounds by a block drafter on a GPU that is not there: what they launch, and that nothing waits.

Tensors have no data, so whatever the host would read of them is an error. A process of its own,
since Triton knows one driver.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.drafters import KINDS, XPRESS, write_drafter
from tests.runtime.launched_kinds import listed_by
from tests.short_models import Shorten

pytestmark = pytest.mark.kernels

ROUNDS = [(1, 7), (1, 3), (2, 7), (3, 3), (8, 1), (16, 3)]  # sequences, drafts of each
LAYERS = 2  # of the drafter, and of the model


@pytest.fixture(scope="module")
def launches(
    shorten: Shorten, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Counter[str]]]:
    """Launches with each kind of drafter, in one process."""
    place, section = tmp_path_factory.mktemp("drafters"), {"target_layer_ids": [0]}
    for kind, base in KINDS.items():
        own = base.get("dflash_config")
        changes: dict[str, Any] = section if own is None else {"dflash_config": own | section}
        write_drafter(place / kind, base=base, num_target_layers=LAYERS, **changes)
    module, drafters = "tests.runtime.engine.draft.test_block_launches", map(place.joinpath, KINDS)
    listed = listed_by(module, shorten("tiny-qwen3.5"), *drafters)
    found = [[Counter(each) for each in some] for some in listed]
    return dict(zip(KINDS, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_is_launched_without_the_host(
    launches: dict[str, list[Counter[str]]], kind: str
) -> None:
    plain, chunk, *rounds = launches[kind]
    for found in (plain, chunk):
        assert found["_write_context_kernel"] == 1  # of all layers
        assert "_attend_block_kernel" not in found
        assert found["_store_hidden_kernel"] == (kind == "lilicorr")
    for found in rounds:
        names = ("_write_context", "_rotate_block", "_attend_block")
        assert [found[f"{name}_kernel"] for name in names] == [1, LAYERS, LAYERS]
        for name in ("begin_blocks", "place_drafts", "accept", "join_copies"):
            assert found[f"_{name}_kernel"] == 1
        assert found["_convolve_kernel"] == (4 * LAYERS if kind == "dflash2" else 0)
    greedy, ordered = rounds[:-1], rounds[-1]
    for (_, drafts), found in zip(ROUNDS, greedy, strict=True):
        # At once, each behind the one before, or all by pass.
        choices, tables = {
            "dflash": (1, 0),
            "dspark": (drafts, drafts),
            "domino": (drafts, drafts),
            "dflash2": (drafts, drafts + 1),  # that table's rows of all candidates too
            "xpress": (1 + XPRESS["xpress_num_passes"], XPRESS["xpress_num_passes"]),
            "lilicorr": (drafts, 2),  # of candidates, and contexts
        }[kind]
        assert found["_likeliest_rows_kernel"] == choices + 1
        # Embeddings of blocks, of the tokens that are checked, and of those before drafts.
        assert found["_embed_kernel"] == 2 + tables
    assert ordered["_likeliest_rows_kernel"] > 2  # by place, since penalties count them


def launches_of(folder: Path, drafter: Path) -> list[Counter[str]]:
    """Kernels of a plain step, of a chunk, of greedy rounds, and of one with penalties."""
    import torch

    from lowbit.formats.architectures import kind_of
    from lowbit.formats.architectures.dflash import DFlashConfig
    from lowbit.formats.kv_cache import BF16_CACHE
    from lowbit.runtime.backends import cuda
    from lowbit.runtime.engine.draft import block, made
    from lowbit.runtime.engine.draft.block import BlockRounds, new_blocks
    from lowbit.runtime.engine.draft.verify import Verifier
    from lowbit.runtime.engine.load_options import LoadOptions
    from lowbit.runtime.engine.runner import Runner
    from lowbit.runtime.kernels.launch.card import H200
    from lowbit.runtime.lab import fake_gpu
    from lowbit.runtime.models.architectures import DRAFTER_BUILD
    from lowbit.runtime.models.loader import open_model, with_drafter
    from lowbit.runtime.state.device_state import kv_pages

    names: list[str] = []

    def record(kernel: Any, grid: Any, arguments: Any, named: Any) -> None:
        names.append(kernel.__name__)
        tensors = (each for each in arguments if isinstance(each, torch.Tensor))
        if not all(
            each.is_contiguous() for each in tensors
        ):  # kernels count from element to element
            raise AssertionError(f"{kernel.__name__} reads numbers that are not side by side")

    def launched() -> Counter[str]:
        found = Counter(names)
        names.clear()
        return found

    fake_gpu.fake_gpu(H200, record)
    opened = with_drafter(open_model(folder, "int4"), drafter)
    options = LoadOptions(max_sequences=16, context=600, speculate="dflash", drafter=drafter)
    runner, own = fake_gpu.meta_runner(opened, options, 4000), opened.drafter
    assert own is not None
    assert isinstance(own.config, DFlashConfig)
    pages = kv_pages(own.config, runner.state.pages.count, BF16_CACHE, "meta")
    weights = fake_gpu.MetaWeights(
        *(own.checkpoint, own.schemes, "meta", torch.bfloat16, cuda.prepare, cuda.gathered)
    )
    build = DRAFTER_BUILD[kind_of(own.checkpoint.config)]
    made_drafter = build(own.config, weights, cuda, runner.context)
    rows = runner.tables.shape[0]
    blocks = new_blocks(made_drafter, runner.decoder, pages, None, rows, torch.bfloat16)
    runner.blocks = blocks
    for module in (made, block):
        vars(module)["new_ring"] = lambda rows, pinned: torch.zeros(64, rows, dtype=torch.int64)
    rounds = BlockRounds(Verifier(runner), blocks)
    with mock.patch.object(Runner, "on_gpu", property(lambda runner: True)):
        return list(counts_of(runner, rounds, launched))


def counts_of(runner: Any, rounds: Any, launched: Callable[[], Counter[str]]) -> Iterator[Any]:
    """Kernels of the steps of a runner, see `launches_of`."""
    from lowbit.runtime.engine.chunks import Chunks
    from lowbit.runtime.engine.draft.verify import Part
    from lowbit.runtime.engine.graphs import Graphs, width_for
    from lowbit.runtime.engine.request import Request
    from lowbit.runtime.engine.sequence import Sequence
    from lowbit.runtime.state.sampling_params import SamplingParams
    from lowbit.runtime.state.step import StepPlan

    runner.run_step(StepPlan(1, 1, 256, longest=1))
    yield launched()
    chunks = Chunks(runner.decoder, runner.each_layer, runner.tables, Graphs(), longer=True)
    plan = StepPlan(64, 1, 0, longest=64, prompt=True, ending="apart")
    chunks.forward(chunks.padded(plan), runner.shifts)
    yield launched()
    sequence = Sequence(Request((1,)), count=1, seed=0, row=1, length=1)
    sequence.output.append(1)
    for penalty, sizes in ((0.0, ROUNDS), (1.0, [(1, 3)])):
        runner.sampler.configure_row(1, SamplingParams(presence_penalty=penalty), ())
        for B, k in sizes:
            rounds.parts = [Part(sequence, (0,) * k, (1,) * (1 + k))] * B
            adjusted = runner.sampler.shape.adjusted
            rounds.round(width_for(B * (k + 1)), B, k, 256, ordered=adjusted, joined=True)
            yield launched()


if __name__ == "__main__":
    model, *drafters = map(Path, sys.argv[1:])
    json.dump([launches_of(model, each) for each in drafters], sys.stdout)
    sys.stdout.flush()
    os._exit(0)
