"""Launches of chunks of several prompts, and of their first tokens: all are compiled ahead.

The steps are sent to a GPU that is not there, in a process of its own, since Triton knows one
driver.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.runtime.launched_kinds import LaunchedKinds, listed_by
from tests.short_models import Shorten

pytestmark = pytest.mark.kernels

ROWS = 24
WAYS = ("int8", "exact")  # of activations


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_packs_launch_what_was_compiled_ahead(shorten: Shorten, name: str) -> None:
    found = listed_by("tests.runtime.lab.test_pack_launches", shorten(name))
    assert len(found) == len(WAYS)
    for ahead, chunks, firsts in found:
        assert min(len(chunks), len(firsts)) > 5
        assert {*chunks} <= {*ahead}
        assert {*firsts} <= {*ahead}


def launches_of(folder: Path, activations: Any) -> list[list[str]]:
    """Kernels with what Triton compiles them for: sent ahead, of packs, and of their ends."""
    import torch

    from lowbit.runtime.engine.chunks import Chunks
    from lowbit.runtime.engine.load_options import LoadOptions
    from lowbit.runtime.engine.request import Request
    from lowbit.runtime.engine.sequence import Sequence
    from lowbit.runtime.kernels.launch.card import H200
    from lowbit.runtime.lab import fake_gpu
    from lowbit.runtime.models.loader import open_model, with_activations
    from lowbit.runtime.state.sampling_params import SamplingParams
    from lowbit.runtime.thresholds import PACK_SEQUENCES

    kinds = LaunchedKinds()
    fake_gpu.fake_gpu(H200, kinds.note)
    opened = with_activations(open_model(folder, "int4"), activations)
    options = LoadOptions(max_sequences=ROWS, context=600, activations=activations)
    runner = fake_gpu.meta_runner(opened, options, 4000)
    fake_gpu.send_steps(runner, [SamplingParams()], hopper=True)
    ahead = kinds.take()

    def sequences(counts: tuple[int, ...], length: int) -> list[Sequence]:
        found = []
        for row, count in enumerate(counts, 1):
            made = Sequence(Request((0,) * (length + count)), count=1, seed=0, row=row)
            made.length, made.pages = length, list(range(1, 1 + runner.tables.shape[1]))
            found.append(made)
        return found

    for counts in packs(runner.pack_tokens):
        for length in (0, 5, 400) if max(counts) <= 16 else (0, 5):
            for last in (False, True):
                with mock.patch.object(Chunks, "_is_common", return_value=False):
                    list(runner.chunk(sequences(counts, length), last))
    chunks = kinds.take()
    for count in range(1, 1 + PACK_SEQUENCES):
        shape = count, runner.decoder.config.hidden_size
        hidden = torch.empty(shape, dtype=fake_gpu.DTYPE, device="meta")
        runner.begin(sequences((0,) * count, 20), hidden)
    return [ahead, chunks, kinds.take()]


def packs(most: int) -> Iterator[tuple[int, ...]]:
    """Tokens of the prompts of packs of up to `most` tokens."""
    yield from [(1, 1), (3, 16), (16, 16), (16, 1, 16), (4,) * 16, (1,) * 16]
    for each in (17, 31, 32, 60, 90, 101, 200, 512):
        yield from [(each,) * count for count in (2, 3, 5, 16) if count * each <= most]


if __name__ == "__main__":
    json.dump([launches_of(Path(sys.argv[1]), way) for way in WAYS], sys.stdout)
    sys.stdout.flush()
    os._exit(0)
