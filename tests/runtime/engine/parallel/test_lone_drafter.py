"""The first of several ranks drafts by a drafter beside it, which reads whole hidden states."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.convert import Recipe
from lowbit.formats.kv_cache import BF16_CACHE, FP32_CACHE
from lowbit.runtime import SamplingParams
from lowbit.runtime.backends import symmetric
from lowbit.runtime.engine import load as loading
from lowbit.runtime.engine import memory
from lowbit.runtime.engine.draft.block import BlockRounds, new_blocks
from lowbit.runtime.engine.draft.source import new_drafts
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.memory import Account, choose_cache
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.parallel.messages import Setup
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.models.loader import (
    OpenedModel,
    load_decoder,
    load_drafter,
    open_model,
    with_activations,
    with_drafter,
)
from lowbit.runtime.models.shards import shard_of
from lowbit.runtime.state.device_state import CacheSize, kv_pages
from lowbit.runtime.weights.linear import DenseLinear
from lowbit.runtime.weights.share import Share
from tests.conversions import convert
from tests.drafters import DSPARK, KINDS, write_drafter
from tests.lanes import in_commands
from tests.runtime.engine.draft.guesses import costs_by_tokens
from tests.runtime.engine.small_engine import assert_all_free
from tests.runtime.ranks_in_threads import add_drafter, linked_runner, shared_runner
from tests.short_models import MODELS, SHORT_VOCABULARY, Shorten

SIZE = CacheSize(context=200, sequences=3, pages=30, snapshots=4, drafts=15)
VOCABULARY = 1000
GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=0.8, top_k=20, seed=5, repetition_penalty=1.2)
IDS = torch.randint(VOCABULARY, (90,), generator=torch.Generator().manual_seed(8)).tolist()
Ranks = Callable[[OpenedModel], Runner]


def one(opened: OpenedModel) -> Runner:
    """A single process."""
    dtype = torch.float32
    decoder = load_decoder(opened, "cpu", dtype, SIZE.context)
    runner = new_runner(decoder, VOCABULARY, SIZE, dtype, "cpu")
    drafter, rows = load_drafter(opened, "cpu", dtype, SIZE.context)
    pages = kv_pages(drafter.config, SIZE.all_pages, FP32_CACHE, "cpu")
    runner.blocks = new_blocks(drafter, decoder, pages, rows, SIZE.rows, dtype)
    return runner


def processes(opened: OpenedModel) -> Runner:
    """Two ranks, as processes of a CPU."""
    runner, _ = shared_runner(opened, 2, SIZE, vocabulary=VOCABULARY)
    add_drafter(runner, opened, 2)
    return runner


def gpus(opened: OpenedModel) -> Runner:
    """Two ranks, linked as on GPUs."""
    runner, others, _ = linked_runner(opened, 2, SIZE, VOCABULARY)
    assert all(other.blocks is None for other in others)
    add_drafter(runner, opened, 2)
    return runner


def drafting(runner: Runner) -> Engine:
    """With as many drafts as there may be."""
    found = new_drafts(runner, LoadOptions(speculate="dflash", drafter="x"), 5, "cpu")
    assert found is not None
    found.policy.costs = costs_by_tokens(0.0, 0.0)
    return Engine(runner, drafting=found)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """All drafts that are made."""
    made: list[list[int]] = []
    draft = BlockRounds.draft

    def noted(rounds: BlockRounds, B: int, k: int, max_kv_len: int) -> Tensor:
        found = draft(rounds, B, k, max_kv_len)
        made.extend(found.tolist())
        return found

    monkeypatch.setattr(BlockRounds, "draft", noted)
    return made


def answers(engine: Engine) -> list[list[int]]:
    """A greedy and a drawn answer together, and one behind a prefix that the cache has."""
    handles = [
        engine.generate(IDS[:60], GREEDY, 6),
        engine.generate(IDS[3:12], DRAWN, 7),
    ]
    found = [list(handle) for handle in handles]
    turn = engine.generate([*IDS[:60], *found[0], *IDS[:9]], GREEDY, 5)
    found.append(list(turn))
    assert turn.reused
    assert turn.speculation is not None
    assert_all_free(engine)
    return found


@pytest.fixture
def opened(request: pytest.FixtureRequest, shorten: Shorten, tmp_path: Path) -> OpenedModel:
    """A model of two layers and a random drafter, whose kind is the parameter."""
    base, section = KINDS[request.param], {"target_layer_ids": [0]}
    own = base.get("dflash_config")
    changes: dict[str, Any] = section if own is None else {"dflash_config": own | section}
    write_drafter(tmp_path, base=base, num_target_layers=2, **changes)
    return with_drafter(open_model(shorten("tiny-qwen3.5"), "int8", 64), tmp_path)


@in_commands("xpress", "domino", "dflash2", "dflash", "dspark")
@pytest.mark.parametrize("opened", KINDS, indirect=True)
def test_drafts_are_those_of_one_process(opened: OpenedModel, drafts: list[list[int]]) -> None:
    """And so are the answers; of drafts that are nearly all wrong, so that none is the token's."""
    of_one = answers(drafting(one(opened))), list(drafts)
    assert len(of_one[1]) > 10
    for ranks in (processes, gpus):
        drafts.clear()
        assert answers(drafting(ranks(opened))) == of_one[0]
        assert drafts == of_one[1], ranks.__doc__


@pytest.mark.commands  # drafts are those of one process above
@pytest.mark.parametrize("ranks", [processes, gpus])
def test_right_drafts(ranks: Ranks) -> None:
    """A trained drafter is right as often as in one process."""
    opened = with_drafter(open_model(MODELS / "tiny-qwen3.5"), MODELS / "tiny-qwen3.5-dflash")
    assert opened.config.tie_word_embeddings
    text = [1, 330, 261, 399, 30, 259, 399, 410]
    found = []
    for runner in (one(opened), ranks(opened)):
        handle = drafting(runner).generate(text, GREEDY, 40)
        tokens = list(handle)
        assert handle.speculation is not None
        found.append((tokens, handle.speculation))
    assert found[0] == found[1]
    assert sum(found[1][1].accepted) > 10


@pytest.mark.commands  # `test_lone_head` has it of a head
@pytest.mark.parametrize("opened", ["xpress"], indirect=True)
def test_inputs_in_eight_bits(opened: OpenedModel, drafts: list[list[int]]) -> None:
    opened = with_activations(opened, "int8")
    found = answers(drafting(processes(opened)))
    plain = processes(opened)
    plain.blocks = None
    engine = Engine(plain)
    assert drafts
    handles = [engine.generate(IDS[:60], GREEDY, 6), engine.generate(IDS[3:12], DRAWN, 7)]
    assert [list(handle) for handle in handles] == found[:2]


@pytest.mark.commands
def test_rows_that_drafts_are_chosen_from(
    shorten: Shorten, tmp_path: Path, drafts: list[list[int]]
) -> None:
    """The first rank reads no whole head then."""
    own = DSPARK | {"num_target_layers": 2, "target_layer_ids": [0]}
    write_drafter(tmp_path / "drafter", base=own)
    convert(shorten("tiny-qwen3.5"), tmp_path / "packed", Recipe(base="int8", draft_vocabulary=500))
    opened = with_drafter(open_model(tmp_path / "packed"), tmp_path / "drafter")
    lone = shard_of(opened, Share(0, 2)).lone
    assert lone is not None
    assert lone.specs == ()
    assert opened.draft is not None
    answers(drafting(one(opened)))
    expected = list(drafts)
    drafts.clear()
    runner = processes(opened)
    answers(drafting(runner))
    assert drafts == expected
    assert {id for some in drafts for id in some} <= set(opened.draft.ids.tolist())


@pytest.mark.parametrize("opened", ["lilicorr"], indirect=True)
def test_the_first_rank_alone_has_the_drafter(opened: OpenedModel) -> None:
    first, other = (shard_of(opened, Share(rank, 2)) for rank in range(2))
    assert first.drafter is opened.drafter
    assert first.lone is not None
    assert first.lone.drafter is None
    assert other.drafter is other.lone is None
    assert not first.drafts
    head = next(spec for spec in opened.specs if spec.role == "head")
    assert first.lone.specs == (head,)


@pytest.mark.parametrize("opened", ["lilicorr"], indirect=True)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_its_memory_is_counted_once(opened: OpenedModel, device: str) -> None:
    """Weights, the whole head, pages, contexts, and what it reads of a chunk on a GPU."""
    kind = device, torch.bfloat16
    shard, own = shard_of(opened, Share(0, 2)), opened.drafter
    assert own is not None
    assert shard.lone is not None
    account = Account(shard, *kind, BF16_CACHE, VOCABULARY, ranks=2)
    head = shard.lone.weight_bytes(*kind)
    weights = own.weight_bytes(*kind) + head
    assert head > SHORT_VOCABULARY * 256
    pages = kv_pages(own.config, 4, BF16_CACHE, "meta").size_bytes
    contexts = SIZE.rows * 128 * 256 * 2
    more = weights + pages + contexts + (account.drafter_bytes() if device == "cuda" else 0)
    assert account.needed(SIZE, 4) - account.follower.needed(SIZE, 4) == more
    other = Account(shard_of(opened, Share(1, 2)), *kind, BF16_CACHE, VOCABULARY, ranks=2)
    assert account.follower.needed(SIZE, 4) == other.needed(SIZE, 4)


@pytest.mark.parametrize("opened", ["dflash"], indirect=True)
def test_a_tied_head_is_not_read_again(opened: OpenedModel, shorten: Shorten) -> None:
    tied = replace(open_model(shorten("tiny-qwen3.5")), drafter=opened.drafter)
    shard = shard_of(tied, Share(0, 2))
    assert shard.lone is not None
    assert shard.lone.specs == ()
    runner = processes(tied)
    blocks, decoder = runner.blocks, runner.decoder
    assert blocks is not None
    target: Any = getattr(blocks, "target", None)
    assert isinstance(target.head, DenseLinear)
    assert target.head.weight.data_ptr() == decoder.embedding.data_ptr()  # type: ignore[union-attr]


class StoppedError(Exception):
    """Nothing more is to be loaded."""


def test_another_gpu_needs_room_for_its_share_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def stop(setup: Setup, shard: OpenedModel) -> None:
        found.append((setup.vocabulary, setup.gpu_bytes))
        raise StoppedError

    for name, value in (
        ("choose_device", lambda device: "cuda"),
        ("check_device", lambda *_: None),
        ("load_drafter", lambda *_: None),
        ("load_shared", stop),
    ):
        monkeypatch.setattr(loading, name, value)
    monkeypatch.setattr(symmetric, "reach_each_other", lambda gpus: True)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**10)
    model, drafter = MODELS / "tiny-qwen3.5", MODELS / "tiny-qwen3.5-dflash"
    shard = shard_of(open_model(model), Share(1, 2))
    asked = LoadOptions(context=64, max_sequences=2, tensor_parallel=2, draft_tokens=1)
    for changes in ({}, {"speculate": "mtp"}, {"speculate": "dflash", "drafter": drafter}):
        options = replace(asked, **changes)
        with pytest.raises(StoppedError):
            loading.load(model, options)
        vocabulary, needed = found.pop()
        other = Account(shard, "cuda", torch.bfloat16, BF16_CACHE, vocabulary, ranks=2)
        size = choose_cache(other, options, 1 if changes else 0)
        assert needed == other.needed(size, size.all_pages)
