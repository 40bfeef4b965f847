"""A follower in a thread of the test, which is its first rank, over a real exchange."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any

import pytest
import torch

from lowbit.formats.activation_modes import Activations
from lowbit.formats.errors import CheckpointError, ResourceError
from lowbit.formats.kv_cache import FP32_CACHE
from lowbit.runtime.backends.exchange import GlooExchange, PartedError, meet
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.parallel import follower as followers
from lowbit.runtime.engine.parallel.follower import check_memory, follow
from lowbit.runtime.engine.parallel.messages import (
    Arrived,
    Met,
    Reading,
    Ready,
    Setup,
    decoded,
    encoded,
)
from lowbit.runtime.models.loader import load_decoder, open_model, with_activations
from lowbit.runtime.models.ranks import load_rank
from lowbit.runtime.models.shards import shard_of
from lowbit.runtime.models.shared_decoder import RunHead, RunPass, portable
from lowbit.runtime.state.device_state import CacheSize, new_state
from lowbit.runtime.state.step_buffers import lone_step
from lowbit.runtime.thresholds import EXACT_TOKENS, STEP_TOKENS
from lowbit.runtime.weights.share import Share
from tests.runtime.conftest import PackedModel
from tests.short_models import Shorten

WAIT_S = 60.0
CACHE = CacheSize(context=64, sequences=2, pages=4, snapshots=0)


class FirstRank:
    """The other end of a follower's socket."""

    def __init__(
        self, folder: Path, store: Path, threads: ThreadPoolExecutor, options: LoadOptions
    ) -> None:
        ours, theirs = (Connection(end.detach()) for end in socketpair())
        self.link, self.ended = ours, threads.submit(self._follow, theirs)
        sizes = torch.float32, CACHE, FP32_CACHE, 1
        self.send(Setup(folder, options, Share(1, 2), store, *sizes))

    @staticmethod
    def _follow(link: Connection) -> None:
        with link:
            follow(link)

    def send(self, message: object) -> None:
        self.link.send_bytes(encoded(message))

    def next(self) -> object:
        assert self.link.poll(WAIT_S)
        message: object = decoded(self.link.recv_bytes())
        return message


@pytest.fixture
def first(
    make_model: Callable[..., PackedModel], tmp_path: Path
) -> Iterator[Callable[..., FirstRank]]:
    with ThreadPoolExecutor(1) as threads:
        made: list[FirstRank] = []

        def start(folder: Path | None = None, **options: Any) -> FirstRank:
            folder, given = (
                folder or make_model(intermediate_size=128).folder,
                LoadOptions(**options),
            )
            made.append(FirstRank(folder, tmp_path / "store", threads, given))
            return made[-1]

        yield start
        for each in made:
            each.link.close()


def met(rank: FirstRank, tmp_path: Path) -> GlooExchange:
    assert rank.next() == Arrived()
    exchange = meet(Share(0, 2), tmp_path / "store", WAIT_S, WAIT_S)
    assert rank.next() == Met()
    return exchange


def error_of(ended: "Future[None]") -> BaseException | None:
    return ended.exception(WAIT_S)


def test_a_gpu_without_room_is_named() -> None:
    sizes = torch.float32, CACHE, FP32_CACHE, 1
    setup = Setup(Path(), LoadOptions(), Share(1, 2), Path(), *sizes, (0, 3), gpu_bytes=10**10)
    check_memory(setup, 10**10)
    check_memory(setup, None)
    with pytest.raises(ResourceError, match=r"GPU 3 has 5\.00 GB free, where 10\.00 GB are needed"):
        check_memory(setup, 5 * 10**9)


@pytest.mark.parametrize(("mode", "near"), [("exact", 1e-4), ("int8", 1e-2)])
def test_a_step_of_both_ranks_gives_the_logits_of_one(
    first: Callable[..., FirstRank],
    make_model: Callable[..., PackedModel],
    tmp_path: Path,
    mode: Activations,
    near: float,
) -> None:
    folder = make_model(intermediate_size=128).folder
    rank = first(folder, activations=mode)
    exchange = met(rank, tmp_path)
    opened = with_activations(open_model(folder), mode)
    shard = shard_of(opened, Share(0, 2))
    model = load_rank(shard, exchange, torch.float32, 64)
    assert rank.next() == Ready()
    ids, step = torch.tensor([5, 6, 7]), lone_step(3, "cpu")
    states = [new_state(each.config, 5, 3, torch.float32, "cpu") for each in (opened, shard)]
    alone = load_decoder(opened, "cpu", torch.float32, 64)
    with torch.inference_mode():
        rank.send(RunPass(ids, portable(step)))
        hidden = model.hidden(ids, states[1], step)
        rank.send(RunHead(hidden))
        logits = model.logits(hidden)
        expected = alone.logits(alone.hidden(ids, states[0], step))
    torch.testing.assert_close(logits, expected, atol=near, rtol=0)
    rank.link.close()
    assert isinstance(error_of(rank.ended), EOFError)


def test_a_plain_shard_beside_a_packed_drafter_loads(
    first: Callable[..., FirstRank], shorten: Shorten, tmp_path: Path
) -> None:
    """Inputs in eight bits change the drafter alone, which only the first rank has."""
    rank = first(shorten("tiny-qwen3"), activations="int8")
    exchange = met(rank, tmp_path)
    assert rank.next() == Ready()
    del exchange


def test_it_tells_what_it_has_read(
    first: Callable[..., FirstRank], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(followers, "LOOK_S", 0.0)
    rank = first()
    exchange = met(rank, tmp_path)
    read = []
    while isinstance(message := rank.next(), Reading):
        read.append(message.module)
    assert message == Ready()
    assert "model.layers.0.mlp.down_proj" in read
    del exchange


def test_it_ends_when_the_first_rank_leaves_an_exchange(
    first: Callable[..., FirstRank], tmp_path: Path
) -> None:
    rank = first()
    exchange = met(rank, tmp_path)
    assert rank.next() == Ready()
    rank.send(RunHead(torch.zeros(1, 64)))
    del exchange  # and its connections
    assert isinstance(error_of(rank.ended), PartedError)


def test_a_folder_that_is_gone(first: Callable[..., FirstRank], tmp_path: Path) -> None:
    rank = first(tmp_path / "nothing")
    met(rank, tmp_path)
    assert isinstance(error_of(rank.ended), CheckpointError)


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    with pytest.raises(PartedError, match="another rank has not come"):
        meet(Share(0, 2), tmp_path / "store", 0.1, 0.1)


@pytest.mark.parametrize("mode", ["exact", "int8"])
def test_a_shard_has_the_inputs_of_the_options(
    make_model: Callable[..., PackedModel], mode: Activations
) -> None:
    folder, sizes = make_model(intermediate_size=128).folder, (torch.float32, CACHE, FP32_CACHE, 1)
    setup = Setup(folder, LoadOptions(activations=mode), Share(1, 2), Path(), *sizes)
    shard = followers._shard(setup)
    assert shard.activations == mode
    assert shard.part_tokens("cuda") == (STEP_TOKENS if mode == "int8" else EXACT_TOKENS)
