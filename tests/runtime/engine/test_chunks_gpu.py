"""Chunks of prompts as CUDA graphs: the bytes of the same chunks launched kernel by kernel."""

import json
import shutil
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.page_counts import PAGE
from lowbit.runtime.engine.chunks import CHUNK_WIDTHS, SHORT_WIDTHS
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.request import Request

FAR = 2048  # tokens

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="chunks are replayed on Hopper alone"),
]

MODELS = Path(__file__).parents[3] / "examples" / "models"
END = 4001  # of a message, without which no chunk has more than CHUNK tokens
IDS = torch.randint(4000, (6000,), generator=torch.Generator().manual_seed(8)).tolist()
SHORT = (1, 3, 7, 9, 13, 16)
LONG = (
    17,
    32,
    33,
    64,
    65,
    100,
    128,
    129,
    192,
    250,
    257,
    500,
    513,
    700,
    800,
    1000,
    1024,
    1070,
    1152,
)
LENGTHS = (*SHORT, *LONG)
NEW = 12


@pytest.fixture(scope="module", params=["tiny-qwen3", "tiny-qwen3.5"])
def model(request: pytest.FixtureRequest) -> lowbit.Model:
    return load(MODELS / request.param, 256)


@pytest.fixture(params=["tiny-qwen3", "tiny-qwen3.5"])
def long_model(request: pytest.FixtureRequest, tmp_path: Path) -> lowbit.Model:
    """A model for 4,096 positions, which has seen nothing."""
    folder = tmp_path / request.param
    shutil.copytree(MODELS / request.param, folder)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config))
    return load(folder, 4096)


def load(folder: Path, context: int) -> lowbit.Model:
    """In INT4, without drafts, whose rounds depend on how long others took."""
    model = lowbit.load(
        folder, device="cuda", quantize="int4", context=context, max_sequences=2, speculate="off"
    )
    model.engine.drafting = None
    return model


def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on chunks are launched."""

    def directly(graphs: Graphs, key: Hashable, step: Callable[[], None]) -> None:
        step()

    monkeypatch.setattr(Graphs, "replay", directly)


def message(ids: list[int]) -> list[int]:
    """The tokens as a message."""
    return [*ids[:-1], END]


def left_by(model: lowbit.Model, ids: list[int]) -> list[Any]:
    """Tokens and log-probabilities of a request, and the bytes that its prompt leaves."""
    engine = model.engine
    engine.forget()
    params, ends = lowbit.SamplingParams(logprobs=3), frozenset({END})
    asked = Request(tuple(ids), params, NEW, prompt_logprobs=3, message_ends=ends)
    handle = engine.submit(asked)
    sequence = handle._sequence
    while sequence.length < len(ids):
        engine.step()
    found: list[Tensor] = []
    state, pages = engine.runner.state, torch.tensor(sequence.pages, device="cuda")
    for store in (state.pages.k, state.pages.v):
        found.append(store[:, pages].flatten(1, 2)[:, : len(ids)].clone())
    if state.recurrent:  # after the first new token
        found += [
            store[:, sequence.row].clone() for store in (state.slots.conv, state.slots.memory)
        ]
    tokens = handle.result()
    bits = [each.contiguous().view(torch.uint8) for each in found]
    return [tokens, list(handle.log_probabilities), handle.prompt_log_probabilities, bits]


def same(one: list[Any], other: list[Any]) -> bool:
    return one[:3] == other[:3] and all(
        torch.equal(*pair) for pair in zip(one[3], other[3], strict=True)
    )


def recorded(model: lowbit.Model) -> list[int]:
    """Widths of chunks that graphs are there of."""
    chunks: Any = model.engine.runner.chunks
    return [plan.tokens for plan, _ in chunks.graphs._graphs]


def test_a_replayed_prompt_leaves_the_bytes_of_a_launched_one(
    long_model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each width is replayed for other tokens, and another number of them, than recorded."""
    widths = (*SHORT_WIDTHS, *CHUNK_WIDTHS)
    for width, before in zip(widths, (0, *widths), strict=False):
        for count in (width, before + 1):
            left_by(long_model, message(IDS[count : 2 * count]))
    assert set(recorded(long_model)) == set(widths)
    found = [left_by(long_model, message(IDS[:count])) for count in LENGTHS]
    with monkeypatch.context() as patch:
        launched(patch)
        for count, each in zip(LENGTHS, found, strict=True):
            assert same(each, left_by(long_model, message(IDS[:count]))), count


def test_chunks_far_into_a_prompt(
    long_model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far into a prompt, behind chunks that were replayed too, and behind a cached prefix."""
    counts = (FAR - 30, FAR + 200, FAR + 1500)
    for start in (0, 100):
        for count in counts:
            left_by(long_model, IDS[start : start + count])
    assert recorded(long_model)
    found = [left_by(long_model, IDS[50 : 50 + count]) for count in counts]
    with monkeypatch.context() as patch:
        launched(patch)
        for count, each in zip(counts, found, strict=True):
            assert same(each, left_by(long_model, IDS[50 : 50 + count])), count


def test_padding_is_written_nowhere(model: lowbit.Model) -> None:
    """Pages of others and the room behind a prompt keep what they hold, launched and replayed."""
    engine, state = model.engine, model.engine.runner.state
    for turn in range(3):
        engine.forget()
        for store in (state.pages.k, state.pages.v):
            store.fill_(7.0)
        handle = engine.generate(IDS[turn : turn + 70], lowbit.SamplingParams(), 1)
        handle.result()
        own = handle._sequence.pages
        for store in (state.pages.k, state.pages.v):
            others = [page for page in range(1, store.shape[1]) if page not in own[:2]]
            assert bool((store[:, others] == 7.0).all())
            assert bool((store[:, own[1], 70 - PAGE :] == 7.0).all())


def test_prompts_beside_each_other_are_as_if_alone(model: lowbit.Model) -> None:
    """Replayed chunks and replayed steps, in one pool of memory, take turns."""
    asked = [(IDS[place : place + 70], 30) for place in (0, 70, 140, 210, 280)]
    for _ in range(2):
        alone = []
        for ids, count in asked:
            model.engine.forget()
            alone.append(list(model.engine.generate(ids, lowbit.SamplingParams(), count)))
        model.engine.forget()
        handles = [model.engine.generate(ids, lowbit.SamplingParams(), n) for ids, n in asked]
        assert [list(handle) for handle in handles] == alone
    assert 128 in recorded(model)


def test_a_model_without_graphs_of_chunks_answers_the_same(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are not padded: kernels of linears, attention and states mind no padding."""
    counts = (5, 12, 17, 40, 65, 100, 130, 200)
    found = [left_by(model, IDS[:count]) for count in counts]
    monkeypatch.setattr(model.engine.runner, "chunks", None)
    for count, each in zip(counts, found, strict=True):
        assert same(each, left_by(model, IDS[:count])), count
