"""The context that fits into free memory."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lowbit.formats.architectures.footprint import DEFAULT_CONTEXT, STAGED, state_bytes
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.kv_cache import BF16_CACHE, INT8_CACHE, CacheType
from lowbit.formats.page_counts import EXTRA, PAGE, pages_for
from lowbit.formats.sampling_ranges import MOST_BIASES
from lowbit.runtime import LoadOptions, load
from lowbit.runtime.engine import memory
from lowbit.runtime.engine.load import decide
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.models.loader import (
    OpenedModel,
    load_decoder,
    open_model,
    with_activations,
)
from lowbit.runtime.models.shards import shard_of
from lowbit.runtime.state.device_state import CacheSize, new_state
from lowbit.runtime.state.sampler import new_sampler_rows
from lowbit.runtime.thresholds import PACK_SEQUENCES
from lowbit.runtime.weights.share import Share
from tests.lanes import in_commands

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

Free = Callable[[float], None]
VOCABULARY = 261  # of the tokenizer; the models have padding beyond


def account(opened: OpenedModel, device: str = "cpu") -> memory.Account:
    return memory.Account(opened, device, torch.bfloat16, BF16_CACHE, VOCABULARY)


def rows(sequences: int) -> CacheSize:
    """Of so many sequences, without drafts."""
    return CacheSize(0, sequences, pages=0, snapshots=3 + sequences)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    """`free(n)` leaves n bytes of memory."""
    return lambda size: monkeypatch.setattr(memory, "free_bytes", lambda device: int(size))


def test_the_default_context_is_what_fits(
    make_model: "Callable[..., PackedModel]", free: Free
) -> None:
    folder = make_model(max_position_embeddings=100_000).folder
    opened = open_model(folder)
    held = opened.weight_bytes("cpu", torch.bfloat16) + account(opened).row_bytes(rows(4))
    per_token = 2 * 2 * 2 * 32 * 2  # k and v, layers, kv heads, head_dim, bytes
    free(1e12)
    assert load(folder, device="cpu").context == DEFAULT_CONTEXT
    free((held + 5000.5 * per_token) * memory.HEADROOM)
    assert load(folder, device="cpu").context == (5000 // PAGE - EXTRA) * PAGE
    model = load(folder, device="cpu", context=3000)
    assert model.context == 3000
    assert model.cache.pages == 5000 // PAGE - EXTRA  # of the four contexts asked for, what fits


def test_states_of_linear_layers_count_by_sequence(
    make_qwen3_5: "Callable[..., PackedModel]", free: Free
) -> None:
    folder = make_qwen3_5(max_position_embeddings=100_000).folder
    opened = open_model(folder)
    weights = opened.weight_bytes("cpu", torch.bfloat16)
    channels, elements = 2 * 2 * 32 + 4 * 32, 4 * 32 * 32
    snapshot = 2 * (channels * 3 * 2 + elements * 4)  # layers, BF16 and FP32
    state = snapshot + 2 * 4  # key heads
    page = 2 * 1 * 2 * 64 * 2 * PAGE  # k and v, one layer with keys, kv heads, head_dim, bytes
    for sequences in (1, 4):
        states, kept = (1 + sequences) * state, 3 + sequences  # a scratch state; snapshots
        held = account(opened).row_bytes(rows(sequences))
        sampler = new_sampler_rows(1 + sequences, VOCABULARY, "cpu").size_bytes
        assert held == states + kept * snapshot + sampler
        free((weights + held + 79.5 * page) * memory.HEADROOM)
        model = load(folder, device="cpu", max_sequences=sequences)
        assert model.context == (79 - EXTRA) * PAGE
        assert model.engine.runner.cache_bytes == states + 79 * page
        assert model.cache.snapshots == model.engine.runner.snapshots.count == kept


def test_snapshots_get_a_share_of_the_memory_that_the_host_has_left(
    make_qwen3_5: "Callable[..., PackedModel]",
    make_model: "Callable[..., PackedModel]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = open_model(make_qwen3_5(max_position_embeddings=100_000).folder)
    each = state_bytes(opened.config, 2)
    options = LoadOptions(context=4096, max_sequences=2)

    def chosen(device: str, free: dict[str, int | None], of: OpenedModel = opened) -> int:
        monkeypatch.setattr(memory, "free_bytes", free.__getitem__)
        return memory.choose_cache(account(of, device), options).snapshots

    for left, expected in ((0, 0), (4 * each - 1, 0), (39 * each, 9), (10**12, 128), (None, 128)):
        assert chosen("cuda", {"cuda": 10**12, "cpu": left}) == expected  # one a page at most
    size = replace(rows(2), pages=128)
    taken = account(opened).needed(size, size.all_pages)
    for spare, expected in ((1, 5), (39, 9), (10**9, 128)):
        assert chosen("cpu", {"cpu": int((taken + spare * each) * memory.HEADROOM) + 2}) == expected
    monkeypatch.setattr(memory, "SNAPSHOT_BYTES", 20 * each + 1)
    assert chosen("cuda", {"cuda": 10**12, "cpu": 10**12}) == 20
    assert chosen("cuda", {"cuda": 10**12, "cpu": None}) == 20
    assert chosen("cpu", {"cpu": 10**12}) == 20
    dense = open_model(make_model(max_position_embeddings=100_000).folder)
    assert chosen("cuda", {"cuda": 10**12, "cpu": 10**12}, dense) == 0


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_snapshots_of_all_ranks_lie_in_one_host(
    make_qwen3_5: "Callable[..., PackedModel]", monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Each keeps a part of every snapshot, and together they take what a lone process may."""
    opened = open_model(make_qwen3_5(max_position_embeddings=100_000).folder)
    shard, most = shard_of(opened, Share(0, 2)), 60 * state_bytes(opened.config, 2)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**12)
    monkeypatch.setattr(memory, "SNAPSHOT_BYTES", most)
    two = replace(account(shard, device), ranks=2)
    count = memory.choose_cache(two, LoadOptions(context=4096, max_sequences=2)).snapshots
    part = state_bytes(shard.config, 2)
    assert most - 2 * part < 2 * part * count <= most


def test_a_model_of_linear_layers_alone_takes_any_context(
    make_qwen3_5: "Callable[..., PackedModel]",
) -> None:
    folder = make_qwen3_5(num_hidden_layers=2, layer_types=["linear_attention"] * 2).folder
    model = load(folder, device="cpu")
    assert model.context == 256
    assert len(model.generate("ab", raw=True, max_new_tokens=3).token_ids) == 3


def test_a_gpu_keeps_room_beside_weights_and_cache(
    make_qwen3_5: "Callable[..., PackedModel]", free: Free
) -> None:
    opened = open_model(make_qwen3_5(max_position_embeddings=100_000).folder)
    asked = account(opened, "cuda")
    held = opened.weight_bytes("cuda", torch.bfloat16) + asked.row_bytes(rows(1))
    free((held + memory.GPU_WORKSPACE + asked.page_bytes(79)) * memory.HEADROOM + 1)
    options = LoadOptions(max_sequences=1)
    assert memory.choose_cache(asked, options).context == (79 - EXTRA) * PAGE


def test_auto_takes_int8_where_bf16_does_not_fit(
    make_model: "Callable[..., PackedModel]", free: Free
) -> None:
    folder = make_model(max_position_embeddings=100_000).folder
    opened = open_model(folder)
    held = opened.weight_bytes("cpu", torch.bfloat16) + account(opened).row_bytes(rows(1))
    page = account(opened).page_bytes(1)
    asked = LoadOptions(device="cpu", context=5120, max_sequences=1, kv_cache="auto")
    pages = 5120 // PAGE + EXTRA
    for spare, name, reason in (
        (0.5, "bf16", "a cache of 5,120 tokens fits"),
        (-0.5, "int8", "a cache of 5,120 tokens does not fit in bf16"),
    ):
        free((held + (pages + spare) * page) * memory.HEADROOM)
        model = load(folder, asked)
        assert model.context == 5120
        assert model.kv_cache == memory.ChosenType(
            {"bf16": BF16_CACHE, "int8": INT8_CACHE}[name], reason
        )
        assert model.engine.runner.state.pages.quantized is (name == "int8")
    # By name nothing is chosen, and what has always been shortened still is.
    model = load(folder, device="cpu", max_sequences=1)
    assert (model.kv_cache, model.context) == (memory.ChosenType(BF16_CACHE), 5120 - PAGE)


def test_auto_on_a_gpu_halves_long_contexts(
    make_model: "Callable[..., PackedModel]", free: Free
) -> None:
    folder = make_model(max_position_embeddings=100_000).folder
    asked = account(open_model(folder), "cuda")
    free(1e12)
    for context, expected in ((8192, BF16_CACHE), (8193, INT8_CACHE)):
        options = LoadOptions(context=context, kv_cache="auto")
        assert memory.choose_cache_type(asked, options).cache_type == expected
        on_cpu = replace(asked, device="cpu")
        assert memory.choose_cache_type(on_cpu, options).cache_type == BF16_CACHE


def test_auto_on_a_gpu_halves_what_many_sequences_read(
    make_model: "Callable[..., PackedModel]", free: Free
) -> None:
    asked = account(open_model(make_model(max_position_embeddings=100_000).folder), "cuda")
    free(1e12)
    for sequences, expected in ((64, BF16_CACHE), (65, INT8_CACHE)):
        options = LoadOptions(context=2048, max_sequences=sequences, kv_cache="auto")
        assert memory.choose_cache_type(asked, options).cache_type == expected
        on_cpu = replace(asked, device="cpu")
        assert memory.choose_cache_type(on_cpu, options).cache_type == BF16_CACHE
        named = replace(options, kv_cache="bf16")
        assert memory.choose_cache_type(asked, named) == memory.ChosenType(BF16_CACHE)


@pytest.mark.parametrize("cache_type", [BF16_CACHE, INT8_CACHE], ids=lambda it: it.name)
@pytest.mark.parametrize("sequences", [1, 5])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_account_counts_what_a_runner_allocates(
    make_qwen3_5: "Callable[..., PackedModel]",
    monkeypatch: pytest.MonkeyPatch,
    sequences: int,
    device: str,
    cache_type: CacheType,
) -> None:
    """Pages and states, the sampler's rows, the head's hidden ring, and snapshots.

    A GPU has buffers for these, and logits that it keeps.
    """
    opened = open_model(make_qwen3_5(mtp_num_hidden_layers=1).folder, head=True)
    decoder = load_decoder(opened, "cpu", torch.bfloat16, 128)
    size = CacheSize(128, sequences, pages=7, snapshots=3 + sequences, drafts=6)
    where = "cpu" if device == "cpu" else "meta"
    runner = new_runner(decoder, VOCABULARY, size, torch.bfloat16, where, cache_type=cache_type)
    assert runner.hidden_ring is not None
    slots, sampler = runner.state.slots, runner.sampler
    paged = list(runner.state.pages.stores)
    others = [slots.conv, slots.memory, slots.arrived, runner.hidden_ring]
    others += [sampler.knobs, sampler.whole, sampler.seen, sampler.counts]
    others += [sampler.bias_ids, sampler.bias, *runner.snapshots._buffers]
    if device == "cpu":
        for number in range(size.snapshots):
            runner.snapshots.save(0, number)
            others += runner.snapshots._kept[number]
    if device == "cuda":
        monkeypatch.setattr(Runner, "on_gpu", True)
        runner.make_room_to_keep()
        others += runner.kept.parts
    asked = replace(account(opened, device), cache_type=cache_type)
    assert sum(each.nbytes for each in paged) == asked.page_bytes(size.all_pages)
    assert sum(each.nbytes for each in others) == asked.row_bytes(size)
    weights = opened.weight_bytes(device, torch.bfloat16)
    beside = memory.GPU_WORKSPACE if device == "cuda" else 0
    if device == "cuda" and cache_type.scaled:  # keys and values of a layer in BF16
        config = opened.config
        each = config.num_key_value_heads * config.head_dim * torch.bfloat16.itemsize
        beside += 2 * (pages_for(size.context) + PACK_SEQUENCES) * PAGE * each
    all_bytes = sum(each.nbytes for each in (*paged, *others))
    assert asked.needed(size, size.all_pages) == weights + beside + all_bytes


def test_ranks_on_a_cpu_share_its_memory(make_model: "Callable[..., PackedModel]") -> None:
    """Each has its shard of weights and pages; on GPUs each has a GPU's memory to itself."""
    opened = open_model(make_model(intermediate_size=128).folder)
    shard = shard_of(opened, Share(0, 2))
    size = CacheSize(context=64, sequences=2, pages=8, snapshots=0)
    one = account(opened)
    two = replace(account(shard), ranks=2)
    assert two.page_bytes(8) == one.page_bytes(8)
    assert two.row_bytes(size) == 2 * account(shard).row_bytes(size)
    weights = 2 * shard.weight_bytes("cpu", torch.bfloat16)
    assert two.needed(size, 8) == weights + two.row_bytes(size) + one.page_bytes(8)
    assert replace(two, device="cuda").page_bytes(8) == one.page_bytes(8) // 2


def test_sequences_of_a_large_vocabulary_take_what_is_announced(
    make_qwen3_5: "Callable[..., PackedModel]",
) -> None:
    """248k tokens: `seen`, `counts`, kept logits, hidden rings of h = 4096."""
    opened = open_model(make_qwen3_5(mtp_num_hidden_layers=1).folder, head=True)
    config = replace(opened.config, vocab_size=248_320, hidden_size=4096)
    large = memory.Account(
        replace(opened, config=config), "cuda", torch.bfloat16, BF16_CACHE, 248_320
    )
    for sequences, megabytes in ((64, [81, 64, 68]), (256, [319, 254, 269])):
        states = new_state(config, 0, rows(sequences).slots, torch.bfloat16, "meta").size_bytes
        states += STAGED * state_bytes(config, 2)
        R, kept = 1 + sequences, sequences * 4 * 248_320
        sampler, hidden_ring = R * 5 * 248_320, R * 128 * 4096 * 2
        knobs = R * (6 * 8 + 4 * 8 + MOST_BIASES * 16)
        assert large.row_bytes(rows(sequences)) == states + sampler + knobs + kept + hidden_ring
        assert [round(each / 1e6) for each in (sampler, kept, hidden_ring)] == megabytes


def test_graphs_of_many_sequences_count(make_model: "Callable[..., PackedModel]") -> None:
    """None up to 64; above, one for each part, number of sequences and length."""
    folder = make_model(max_position_embeddings=100_000).folder
    exact = account(open_model(folder), "cuda")
    rounded = replace(exact, opened=with_activations(exact.opened, "int8"))
    for sequences, parts, wide in ((64, 0, 0), (65, 2, 1), (97, 4, 2), (256, 11, 4)):
        for context, lengths in ((256, 1), (8192, 6)):
            size = CacheSize(context, sequences, pages=0, snapshots=0)
            assert exact.graph_bytes(size) == parts * lengths * memory.GRAPH_BYTES
            assert rounded.graph_bytes(size) == wide * lengths * memory.GRAPH_BYTES
    most = CacheSize(8192, 256, pages=0, snapshots=0)
    beside = exact.needed(most, 9) - exact.row_bytes(most) - exact.page_bytes(9)
    weights = exact.opened.weight_bytes("cuda", torch.bfloat16)
    assert beside == weights + memory.GPU_WORKSPACE + exact.graph_bytes(most)


def test_memory_decides_how_many_sequences_a_gpu_decodes(
    make_qwen3_5: "Callable[..., PackedModel]", free: Free
) -> None:
    """As many as have a cache of 2,048 tokens each; rows and states of them count."""
    opened = open_model(make_qwen3_5(max_position_embeddings=100_000).folder)
    asked = account(opened, "cuda")
    chosen, options = memory.choose_sequences, LoadOptions(max_sequences=None)
    assert chosen(asked, LoadOptions(max_sequences=200)) == memory.ChosenSequences(200)
    free(1e12)
    most = "the most by default, with a cache of 2,048 tokens each"
    assert chosen(asked, options) == memory.ChosenSequences(64, most)
    short = chosen(asked, replace(options, context=1000))
    assert short == memory.ChosenSequences(64, most.replace("2,048", "1,024"))
    tokens = replace(options, cache_tokens=10 * 2048 + 64)
    fit = "as many as fit with a cache of 2,048 tokens each"
    assert chosen(asked, tokens) == memory.ChosenSequences(10, fit)
    assert chosen(replace(asked, device="cpu"), options).reason == "the default on a CPU"
    for kv_cache in ("bf16", "int8"):
        cache_type = INT8_CACHE if kv_cache == "int8" else BF16_CACHE
        size = CacheSize(8192, 20, pages=20 * 32, snapshots=23)
        free(replace(asked, cache_type=cache_type).needed(size, size.all_pages) * 1.051)
        found = chosen(asked, replace(options, kv_cache=kv_cache))
        assert found == memory.ChosenSequences(20, fit), kv_cache
    free(1000)
    assert chosen(asked, options) == memory.ChosenSequences(1, "memory is short")


@in_commands(
    "asked_for0-make_model-cuda",
    "asked_for0-make_qwen3_5-cpu",
    "asked_for1-make_model-cpu",
    "asked_for1-make_qwen3_5-cuda",
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("make", ["make_model", "make_qwen3_5"])
@pytest.mark.parametrize("asked_for", [{}, {"speculate": "mtp", "draft_tokens": 3}])
def test_sequences_that_nobody_asked_for_take_no_context(
    make: str, asked_for: dict[str, Any], device: str, request: pytest.FixtureRequest, free: Free
) -> None:
    """States and rows of further sequences leave fewer pages where memory is nearly full."""
    folder = request.getfixturevalue(make)(max_position_embeddings=100_000).folder
    asked = account(open_model(folder), device)
    drafts = asked_for.get("draft_tokens", 0)
    counts = set()
    limits: tuple[dict[str, Any], ...] = ({}, {"context": 20_000}, {"cache_tokens": 30_000})
    for limit, pages in itertools.product(limits, range(16, 600, 29)):
        alone = LoadOptions(max_sequences=1, **asked_for, **limit)
        size = memory.asked_cache(asked, alone, drafts)
        bytes_free = int(asked.needed(size, pages + EXTRA) * 1.0501)
        free(bytes_free)
        try:
            most = memory.choose_cache(asked, alone, drafts)
        except ResourceError:
            continue
        chosen = decide(asked, LoadOptions(max_sequences=None, **asked_for, **limit))
        short = most.context < size.context
        least = most.context * 15 // 16 if short else most.context
        assert least <= chosen.cache.context <= most.context, (limit, pages)
        counts.add(chosen.sequences.count)
        shortens = chosen.sequences.reason == "more would shorten the context"
        assert not (shortens and "cache_tokens" in limit)
        if shortens or chosen.sequences.reason == "more would leave too little for cache_tokens":
            further = LoadOptions(max_sequences=chosen.sequences.count + 1, **asked_for, **limit)
            more = asked.pages_that_fit(memory.asked_cache(asked, further, drafts), bytes_free)
            assert more < most.pages * (15 / 16 if short else 1)
    assert len(counts) > 1 and 16 in counts if device == "cpu" else len(counts) > 3, counts


def test_auto_rounds_where_the_context_that_was_asked_for_does_not_fit(
    make_model: "Callable[..., PackedModel]", free: Free
) -> None:
    folder = make_model(max_position_embeddings=100_000, num_hidden_layers=8).folder
    asked = account(open_model(folder), "cuda")
    options = LoadOptions(max_sequences=1, context=8192)
    size = memory.asked_cache(asked, options, 0)
    free(asked.needed(size, 100 + EXTRA) * 1.0501)
    found = decide(asked, LoadOptions(max_sequences=None, kv_cache="auto", context=8192))
    assert (found.kv_cache.cache_type, found.cache.context) == (INT8_CACHE, 8192)


def test_sequences_that_memory_chose_do_not_make_auto_round(
    make_model: "Callable[..., PackedModel]", free: Free
) -> None:
    """Nobody asked for whole contexts of all of them: 2,048 tokens each are enough."""
    asked = account(open_model(make_model(max_position_embeddings=100_000).folder), "cuda")
    options = LoadOptions(max_sequences=20, kv_cache="auto")
    size = CacheSize(8192, 20, pages=20 * 32, snapshots=23)
    free(asked.needed(size, size.all_pages) * 1.051)
    assert memory.choose_cache_type(asked, options).cache_type == INT8_CACHE
    chosen = replace(asked, auto_tokens=20 * 2048)
    assert memory.choose_cache_type(chosen, options) == memory.ChosenType(
        BF16_CACHE, "a cache of 40,960 tokens fits"
    )


def test_too_little_memory_says_what_is_needed_and_what_fits(
    make_model: "Callable[..., PackedModel]", free: Free
) -> None:
    folder = make_model(max_position_embeddings=100_000).folder
    free(3_000_000)
    wanted = r"needs .* 90048 tokens for 4 sequences, free on cpu: 3\.0 MB"
    with pytest.raises(ResourceError, match=wanted) as e:
        load(folder, device="cpu", context=90_000)
    assert e.value.hint is not None
    fitting = int(e.value.hint.split()[1])
    assert load(folder, device="cpu", context=fitting).context == fitting
    with pytest.raises(ResourceError):
        load(folder, device="cpu", context=fitting + 1)
    with pytest.raises(ResourceError, match=r"needs .* 90048 tokens for 4 sequences"):
        load(folder, device="cpu", context=fitting, cache_tokens=90_000)
    with pytest.raises(ResourceError) as e:
        load(folder, device="cpu", context=64, cache_tokens=90_000)
    halved = re.fullmatch(
        f"a cache of {fitting} tokens fits; with --kv-cache int8, a cache of (\\d+) tokens fits",
        e.value.hint or "",
    )
    assert halved is not None
    assert int(halved[1]) > 1.8 * fitting
    load(folder, device="cpu", context=64, cache_tokens=fitting)
    more = int(halved[1])
    load(folder, device="cpu", context=64, cache_tokens=more, kv_cache="int8")
    with pytest.raises(ResourceError, match=r"a cache \(int8\) of \d+ tokens for 4 sequences") as e:
        load(folder, device="cpu", context=64, cache_tokens=more + 1, kv_cache="int8")
    assert e.value.hint == f"a cache of {more} tokens fits"
    with pytest.raises(ResourceError, match=r"a cache \(bf16\) of \d+ tokens") as e:
        load(folder, device="cpu", context=64, cache_tokens=more)
    assert e.value.hint == f"--kv-cache int8 fits; a cache of {fitting} tokens fits"
    free(1000)
    with pytest.raises(ResourceError, match="needs") as e:
        load(folder, device="cpu")
    assert e.value.hint == "the weights alone do not fit"


def test_devices_and_dtypes_that_are_not_there(
    make_model: "Callable[..., PackedModel]", monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model().folder
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load(folder).device == "cpu"
    with pytest.raises(ResourceError, match="no CUDA device was found"):
        load(folder, device="cuda")
    with pytest.raises(RequestError, match="device must be auto, cpu or cuda, got `tpu`"):
        load(folder, device="tpu")
    with pytest.raises(RequestError, match="dtype must be bfloat16 or float32"):
        load(folder, device="cpu", dtype=torch.float16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RequestError, match="float32 runs on the CPU only"):
        load(folder, device="cuda", dtype=torch.float32)
