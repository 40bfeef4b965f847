"""Memory by rank: what a rank loads, numbers that fit, and devices that do not run it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from lowbit.formats.errors import LowbitError, RequestError, ResourceError
from lowbit.formats.kv_cache import plain_cache
from lowbit.runtime.cli.main import main
from lowbit.runtime.engine import memory
from lowbit.runtime.engine.load_options import LoadOptions, Mode
from lowbit.runtime.engine.memory import Account, choose_cache
from lowbit.runtime.lab import expected, ranks
from lowbit.runtime.lab.ranks import shared_demand
from lowbit.runtime.models.loader import open_model, with_drafter
from lowbit.runtime.models.shards import SAME_TOKENS, shard_of
from lowbit.runtime.state.device_state import new_state
from lowbit.runtime.weights.share import Share
from tests.drafters import CONFIG, write_drafter
from tests.runtime.conftest import QWEN3_5, PackedModel
from tests.short_models import MODELS, Shorten


@pytest.fixture
def folder(make_model: Callable[..., PackedModel]) -> str:
    return str(make_model(**QWEN3_5, intermediate_size=128).folder)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setattr(expected, "read_bandwidth", lambda device: 20e9)
    monkeypatch.setattr(expected, "products_per_s", lambda: 50e9)
    monkeypatch.setattr(expected, "seconds_beside_read", lambda device, mixture: 1e-3)
    return lambda *arguments: CliRunner().invoke(main, ("doctor", *arguments, "--device", "cpu"))


def test_each_rank_counts_its_shard(folder: str) -> None:
    shared, opened = shared_demand(folder, "cpu", 2), open_model(Path(folder))
    assert [each.rank for each in shared.ranks] == [0, 1]
    for each in shared.ranks:
        shard = shard_of(opened, Share(each.rank, 2))
        assert each.weights == shard.weight_bytes("cpu", torch.bfloat16)
        state = new_state(shard.config, 0, 1, torch.bfloat16, "meta")
        assert each.states == state.slots.conv.nbytes + state.slots.memory.nbytes > 0
        whole = opened.config.kv_layers * 2 * shared.context * shard.config.num_key_value_heads
        assert each.cache == whole * opened.config.head_dim * 2
        assert each.total == each.weights + each.cache + each.states + each.buffers
    assert shared.fitting == (2, 4)
    assert shared.refused is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_its_memory_is_what_loading_asks_for(
    folder: str, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """In less there is no room for the sequence; GPUs are counted one by one."""
    monkeypatch.setattr(ranks, "free_bytes", lambda device: None)
    shared = shared_demand(folder, device, 2)
    needed = [each.total - ranks.LIBRARIES[device] for each in shared.ranks]
    free = sum(needed) if device == "cpu" else max(needed)
    shard = shard_of(open_model(Path(folder)), Share(0, 2))
    kinds = torch.bfloat16, plain_cache(torch.bfloat16), shard.config.vocab_size
    account = Account(shard, device, *kinds, ranks=2)
    options = LoadOptions(context=shared.context, max_sequences=1)
    monkeypatch.setattr(memory, "free_bytes", lambda device: free + 4096)
    assert choose_cache(account, options).context == shared.context
    monkeypatch.setattr(memory, "free_bytes", lambda device: free - 4096)
    with pytest.raises(ResourceError, match="needs"):
        choose_cache(account, options)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("beside", [False, True], ids=["head", "drafter"])
def test_what_drafts_take_is_what_loading_asks_for(
    shorten: Shorten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, beside: bool
) -> None:
    """Rank 0 has the head or the drafter; all have states behind drafts."""
    monkeypatch.setattr(ranks, "free_bytes", lambda device: None)
    section = CONFIG["dflash_config"] | {"target_layer_ids": [0]}
    write_drafter(tmp_path, num_target_layers=2, dflash_config=section)
    model = shorten("tiny-qwen3.5")
    shared = shared_demand(str(model), device, 2, str(tmp_path) if beside else None)
    more = tuple(each.drafts for each in shared.ranks) if beside else shared.head
    assert shared.head == () or not beside
    assert more[0] > 2 * more[1] > 0
    opened = open_model(model, expected.RECIPE, head=not beside)
    opened = with_drafter(opened, tmp_path) if beside else opened
    mode: Mode = "dflash" if beside else "mtp"
    asked = LoadOptions(
        context=shared.context, max_sequences=1, speculate=mode, drafter="x" if beside else None
    )
    totals = [
        each.total + (0 if beside else extra)
        for each, extra in zip(shared.ranks, more, strict=True)
    ]
    needed = [total - ranks.LIBRARIES[device] for total in totals]
    free = sum(needed) if device == "cpu" else max(needed)
    shard = shard_of(opened, Share(0, 2))
    kinds = torch.bfloat16, plain_cache(torch.bfloat16), shard.config.vocab_size
    account = Account(shard, device, *kinds, ranks=2)
    drafts = asked.most_drafts(recurrent=True)
    monkeypatch.setattr(memory, "free_bytes", lambda device: free + 4096)
    assert choose_cache(account, asked, drafts).context == shared.context
    monkeypatch.setattr(memory, "free_bytes", lambda device: free - 4096)
    with pytest.raises(ResourceError, match="needs") as found:
        choose_cache(account, asked, drafts)
    assert found.value.hint is not None
    assert "of it the first process alone takes" in found.value.hint


@pytest.mark.parametrize(("free", "fits"), [(None, None), (10**12, True), (10**8, False)])
def test_free_memory(
    folder: str, monkeypatch: pytest.MonkeyPatch, free: int | None, fits: bool | None
) -> None:
    monkeypatch.setattr(ranks, "free_bytes", lambda device: free)
    assert shared_demand(folder, "cpu", 2).fits is fits


def test_a_number_that_does_not_divide_is_refused_with_those_that_do(folder: str) -> None:
    with pytest.raises(RequestError, match="`tensor_parallel` 3: the model has") as found:
        shared_demand(folder, "cpu", 3)
    assert found.value.hint == "numbers that fit: 2, 4"


@pytest.mark.parametrize("kind", [RequestError, ResourceError])
def test_a_device_that_does_not_run_it_says_so(
    folder: str, monkeypatch: pytest.MonkeyPatch, kind: type[LowbitError]
) -> None:
    def refuses(*_: object) -> None:
        raise kind("is not implemented yet", hint="use another")

    monkeypatch.setattr(ranks, "check_device", refuses)
    monkeypatch.setattr(ranks, "free_bytes", lambda device: None)
    demand = shared_demand(folder, "cuda", 2)
    assert demand.refused == "is not implemented yet; use another"
    assert demand.tokens == SAME_TOKENS["cuda"]


def test_gpus_that_are_not_there_are_counted_too(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    demand = shared_demand(folder, "cuda", 2)
    assert demand.fits is None
    assert "2 processes need as many GPUs" in str(demand.refused)
    graphs_and_exchange = memory.GPU_WORKSPACE + memory.SHARED_WORKSPACE
    assert all(each.buffers > graphs_and_exchange for each in demand.ranks)


def test_doctor_shows_a_row_for_each_rank(run: Callable[..., Result], folder: str) -> None:
    done = run(folder, "--tensor-parallel", "2")
    assert done.exit_code == 0, done.output
    words = " ".join(done.stdout.split())
    assert "shared by 2 processes" in words
    assert "rank weights cache states buffers memory" in words
    assert "numbers that divide heads, widths and groups: 2, 4" in words
    assert SAME_TOKENS["cpu"] in words


def test_doctor_has_the_same_as_json(run: Callable[..., Result], folder: str) -> None:
    shared = json.loads(run(folder, "--tensor-parallel", "2", "--json").stdout)["shared"]
    assert [each["rank"] for each in shared["ranks"]] == [0, 1]
    assert (shared["fitting"], shared["tokens"]) == ([2, 4], SAME_TOKENS["cpu"])
    assert json.loads(run(folder, "--json").stdout)["shared"] is None


def test_doctor_shows_what_drafts_take(
    run: Callable[..., Result], shorten: Shorten, folder: str
) -> None:
    pair = str(MODELS / "tiny-qwen3.5"), "--drafter", str(MODELS / "tiny-qwen3.5-dflash")
    done = run(*pair, "--tensor-parallel", "2")
    assert done.exit_code == 0, done.output
    assert "buffers drafts memory" in " ".join(done.stdout.split())
    assert "mtp" not in done.stdout
    found = json.loads(run(*pair, "--tensor-parallel", "2", "--json").stdout)["shared"]["ranks"]
    assert found[0]["drafts"] > found[1]["drafts"] > 0
    words = run(pair[0], "--tensor-parallel", "2").stdout
    assert "drafts memory" not in " ".join(words.split())
    assert "--speculate mtp or auto: rank 0 drafts, and takes" in words
    assert "mtp" not in run(folder, "--tensor-parallel", "2").stdout  # it has no head


@pytest.mark.parametrize("options", [("--tensor-parallel", "2"), ("x", "--tensor-parallel", "1")])
def test_doctor_needs_a_model_and_a_number(
    run: Callable[..., Result], options: tuple[str, ...]
) -> None:
    assert run(*options).exit_code == 2


def test_doctor_shows_what_images_take_of_the_first(
    run: Callable[..., Result], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = "--tensor-parallel", "2"
    assert "images:" not in run(folder, *shared).stdout
    monkeypatch.setattr(ranks, "vision_bytes", lambda checkpoint: 7_000_000)
    assert "images: rank 0 alone takes 7.0 MB more" in run(folder, *shared).stdout
    assert json.loads(run(folder, *shared, "--json").stdout)["shared"]["vision"] == 7_000_000
