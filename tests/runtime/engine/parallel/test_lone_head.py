"""The first of several ranks drafts by the whole head; here on a CPU, linked as GPUs are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.formats.architectures import part_of
from lowbit.formats.errors import RequestError
from lowbit.formats.kv_cache import BF16_CACHE, INT8_CACHE
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime import SamplingParams, load
from lowbit.runtime.engine import memory
from lowbit.runtime.engine.draft.source import new_drafts
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.load import decide
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.memory import Account
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.span import ImageSpan
from lowbit.runtime.models.loader import OpenedModel, load_decoder, open_model, with_activations
from lowbit.runtime.models.lone_head import lone_head
from lowbit.runtime.models.shards import check_ranks, shard_of
from lowbit.runtime.state.device_state import CacheSize
from lowbit.runtime.weights.share import Share
from tests.lanes import in_commands
from tests.runtime.engine.small_engine import assert_all_free
from tests.runtime.ranks_in_threads import linked_runner, shared_runner

MODELS = Path(__file__).parents[4] / "examples" / "models"
MODEL = MODELS / "tiny-qwen3.5"
SIZE = CacheSize(context=200, sequences=3, pages=12, snapshots=4, drafts=3)
GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=0.8, top_k=20, seed=5, repetition_penalty=1.2)
COUNT = 10
VOCABULARY = 4000


@pytest.fixture(scope="module")
def opened() -> OpenedModel:
    return open_model(MODEL, "int8", 64, head=True)


@pytest.fixture(scope="module")
def prompts(opened: OpenedModel) -> list[list[int]]:
    """Texts that the model's head knows well, and one that it does not."""
    model = load(MODEL, device="cpu", speculate="off")
    texts = ("The little dog was very happy. He", "Once upon a time there was a")
    ids = [model.tokenizer.encode(text) for text in texts]
    model.close()
    return [
        *ids,
        torch.randint(VOCABULARY, (90,), generator=torch.Generator().manual_seed(6)).tolist(),
    ]


Plain = tuple[list[list[int]], list[list[int]], list[int]]


@pytest.fixture(scope="module")
def plain(opened: OpenedModel, prompts: list[list[int]]) -> Plain:
    """Greedy and drawn answers of one process without drafts, and a long one."""
    decoder = load_decoder(opened, "cpu", torch.float32, SIZE.context)
    engine = Engine(new_runner(decoder, VOCABULARY, SIZE, torch.float32, "cpu"))
    greedy, drawn = (answers(engine, prompts, params) for params in (GREEDY, DRAWN))
    return greedy, drawn, list(engine.generate(prompts[0], GREEDY, 24))


def drafting(runner: Runner, speculate: Any = "mtp") -> Engine:
    options = LoadOptions(speculate=speculate, draft_tokens=3)
    return Engine(runner, drafting=new_drafts(runner, options, 3, "cpu"))


def answers(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    handles = [engine.generate(ids, params, COUNT) for ids in prompts]
    found = [list(handle) for handle in handles]
    engine.forget()
    return found


@in_commands("auto")
@pytest.mark.parametrize("speculate", ["mtp", "auto"])
def test_drafts_of_the_first_rank_change_no_token(
    opened: OpenedModel, plain: Plain, prompts: list[list[int]], speculate: str
) -> None:
    runner, others, crew = linked_runner(opened, 2, SIZE, VOCABULARY)
    engine = drafting(runner, speculate)
    greedy, drawn, long = plain
    assert answers(engine, prompts, GREEDY) == greedy
    assert answers(engine, prompts, DRAWN) == drawn
    handle = engine.generate(prompts[0], GREEDY, 24)
    assert list(handle) == long
    assert handle.speculation is not None
    if speculate == "mtp":
        assert sum(handle.speculation.accepted) > 5
        assert sum(handle.speculation.drafted) < 3 * sum(handle.speculation.accepted)
    assert all(other.decoder.mtp is None and other.hidden_ring is None for other in others)
    assert "RunStep" in crew.tasks
    assert_all_free(engine)


def test_drafts_are_those_of_one_process(opened: OpenedModel, prompts: list[list[int]]) -> None:
    """As many are accepted, over a prompt that is continued from the cache, too."""
    decoder = load_decoder(opened, "cpu", torch.float32, SIZE.context)
    one = drafting(new_runner(decoder, VOCABULARY, SIZE, torch.float32, "cpu"))
    two = drafting(linked_runner(opened, 2, SIZE, VOCABULARY)[0])
    counts = []
    for engine in (one, two):
        first = list(engine.generate(prompts[1], GREEDY, COUNT))
        handle = engine.generate([*prompts[1], *first, *prompts[0]], GREEDY, COUNT)
        tokens = list(handle)
        assert handle.reused > 0
        counts.append((first, tokens, handle.speculation))
    assert counts[0] == counts[1]


def test_inputs_in_eight_bits(opened: OpenedModel, prompts: list[list[int]]) -> None:
    """The head rounds its inputs, too; its drafts change no token."""
    rounded = with_activations(opened, "int8")
    runner = linked_runner(rounded, 2, SIZE, VOCABULARY)[0]
    mtp = runner.decoder.mtp
    assert mtp is not None
    assert type(mtp.fc) is type(load_decoder(rounded, "cpu", torch.float32, 64).mtp.fc)  # type: ignore[union-attr]
    plain = Engine(linked_runner(rounded, 2, SIZE, VOCABULARY)[0])
    some = prompts[::2]
    assert answers(drafting(runner), some, GREEDY) == answers(plain, some, GREEDY)


def test_pages_of_the_head_are_its_own(opened: OpenedModel) -> None:
    runner, (other,), _ = linked_runner(opened, 2, SIZE, VOCABULARY)
    pages = runner.head_pages
    assert pages is not None
    assert pages.count == runner.state.pages.count
    assert other.head_pages is None
    assert runner.cache_bytes == other.cache_bytes + pages.size_bytes
    assert runner.head_state.slots is runner.state.slots
    pages.k[:, 3] = 7
    runner._copy_page(3, 5)
    assert bool((pages.k[:, 5] == 7).all())
    assert not bool((pages.k[:, 4] == 7).any())


def test_the_first_rank_alone_reads_the_head(opened: OpenedModel) -> None:
    shards = [shard_of(opened, Share(rank, 2)) for rank in range(2)]
    assert [shard.drafts for shard in shards] == [True, False]
    assert not any(shard.head for shard in shards)
    lone = shards[0].lone
    assert lone is not None
    config = opened.checkpoint.config
    parts = {part_of(config, spec.name) for spec in lone.specs}
    assert "mtp" in parts
    assert not any(part_of(config, spec.name) == "mtp" for spec in shards[0].specs)
    kinds = "cuda", torch.bfloat16
    more = shards[0].weight_bytes(*kinds) - shards[1].weight_bytes(*kinds)
    assert more >= lone.weight_bytes(*kinds) - 2 * opened.config.hidden_size * 64 * 2


def test_memory_of_the_head_is_counted(opened: OpenedModel) -> None:
    def account(shard: OpenedModel) -> Account:
        return Account(shard, "cuda", torch.bfloat16, BF16_CACHE, VOCABULARY, ranks=2)

    shard = shard_of(opened, Share(0, 2))
    with_it, without = account(shard), account(replace(shard, lone=None))
    config, lone = opened.config, shard.lone
    assert lone is not None
    a_page = 2 * config.num_key_value_heads * config.head_dim * 2 * 16
    assert (with_it.page_bytes(4) - without.page_bytes(4)) % 4 == 0
    assert with_it.page_bytes(4) - without.page_bytes(4) >= 4 * a_page
    assert with_it.row_bytes(SIZE) > without.row_bytes(SIZE)
    assert with_it.needed(SIZE, 4) > without.needed(SIZE, 4) + lone.weight_bytes(
        "cuda", torch.bfloat16
    )
    assert with_it.follower == without


def test_one_of_the_processes_on_a_cpu_has_the_head(opened: OpenedModel) -> None:
    """All else is in the memory of the machine once for each of them."""
    shard, kind = shard_of(opened, Share(0, 2)), ("cpu", torch.bfloat16)
    two = Account(shard, *kind, BF16_CACHE, VOCABULARY, ranks=2)
    assert shard.lone is not None
    own = replace(two, ranks=1)
    assert two.needed(SIZE, 4) == own.needed(SIZE, 4) + own.follower.needed(SIZE, 4)
    more = own.needed(SIZE, 4) - own.follower.needed(SIZE, 4)
    ring = SIZE.rows * 128 * opened.config.hidden_size * 2
    pages = own.page_bytes(4) - own.follower.page_bytes(4)
    assert more == shard.lone.weight_bytes(*kind) + ring + pages


def test_widened_keys_of_the_head_are_those_of_all_ranks(opened: OpenedModel) -> None:
    """The head reads a prompt, too, and its layer has more key heads than a rank's."""
    accounts = [
        Account(each, "cuda", torch.bfloat16, INT8_CACHE, VOCABULARY)
        for each in (opened, shard_of(opened, Share(0, 2)), shard_of(opened, Share(1, 2)))
    ]
    whole, first, other = (each.widened_bytes(SIZE) for each in accounts)
    assert first == whole > other


def test_a_cache_that_stays_as_large_leaves_the_head(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    shard = shard_of(opened, Share(0, 2))
    account = Account(shard, "cuda", torch.bfloat16, BF16_CACHE, VOCABULARY, ranks=2)
    options = LoadOptions(tensor_parallel=2, context=128, max_sequences=1)
    decided = decide(account, options)
    assert decided.options.speculate == "auto"
    assert decided.account.opened.lone is not None


def test_heads_that_are_tied_or_have_rows_of_their_own(opened: OpenedModel) -> None:
    names = {spec.module for spec in lone_head(opened).specs}
    tied = opened.config.tie_word_embeddings
    assert ("lm_head" in names) is not tied


@in_commands("True")
@pytest.mark.parametrize("tied", [False, True])
def test_heads_of_experts(make_experts: Any, tied: bool) -> None:
    """The first rank has its experts whole, beside a part of each of the model's."""
    sizes = {"moe_intermediate_size": 64, "tie_word_embeddings": tied}
    packed = make_experts(True, mtp_num_hidden_layers=1, **sizes)
    opened = open_model(packed.folder, head=True)
    decoder = load_decoder(opened, "cpu", torch.float32, SIZE.context)
    one = drafting(new_runner(decoder, 261, SIZE, torch.float32, "cpu"))
    two = drafting(linked_runner(opened, 2, SIZE)[0])
    counts = []
    for engine in (one, two):
        handles = [engine.generate([*range(n)], GREEDY, COUNT) for n in (5, 33)]
        counts.append([(list(handle), handle.speculation) for handle in handles])
    assert counts[0] == counts[1]
    assert all(speculated is not None for _, speculated in counts[1])


def test_groups_of_the_head_need_not_fit_ranks(make_qwen3_5: Any) -> None:
    """It is not shared out; those of the model's linears must."""

    def schemes(wide: str) -> Any:
        return lambda role: Scheme(8, 64 if role == wide else 32)

    sizes = {"mtp_num_hidden_layers": 1, "intermediate_size": 64}
    check_ranks(open_model(make_qwen3_5(schemes("mtp"), **sizes).folder, head=True), 2)
    with pytest.raises(RequestError, match=r"32 columns of .* groups of 64"):
        check_ranks(open_model(make_qwen3_5(schemes("mlp"), **sizes).folder, head=True), 2)


@in_commands("False")
@pytest.mark.parametrize("linked", [False, True])
def test_an_image_before_drafts(
    opened: OpenedModel, prompts: list[list[int]], linked: bool
) -> None:
    """The head of the first of several processes reads a prompt with an image, too."""
    rows = torch.randn(6, opened.config.hidden_size, generator=torch.Generator().manual_seed(1))
    image, before = ImageSpan(40, 2, 3, 0.02 * rows, b"x"), prompts[2][:40]
    request = Request((*before, *[7] * 6, *prompts[0]), GREEDY, COUNT, images=(image,))
    found = []
    for drafts in (False, True):
        share = linked_runner if linked else shared_runner
        runner, *_, crew = share(opened, 2, SIZE, vocabulary=VOCABULARY)
        handle = (drafting(runner) if drafts else Engine(runner)).submit(request)
        found.append(list(handle))
    assert found[1] == found[0]
    assert handle.speculation is not None
    assert handle.speculation.rounds > 2
    tasks = {"RunChunk", "SetShift"} if linked else {"OpenPass", "RunPass"}
    assert tasks <= set(crew.tasks)
