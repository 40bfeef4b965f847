"""Ranks as threads of one process, which exchange tensors at a barrier."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Barrier
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lowbit.formats.kv_cache import FP32_CACHE, CacheType
from lowbit.runtime.backends.cpu_parallel import RankLinear
from lowbit.runtime.backends.exchange import Exchange
from lowbit.runtime.engine.draft.block import new_blocks
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.parallel.followed import FollowedRunner
from lowbit.runtime.engine.parallel.link import GpuLink
from lowbit.runtime.engine.parallel.messages import decoded, encoded
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.models.architectures import Model
from lowbit.runtime.models.loader import Decoder, OpenedModel, load_drafter
from lowbit.runtime.models.ranks import load_rank, load_target
from lowbit.runtime.models.shards import check_ranks, shard_of
from lowbit.runtime.models.shared_decoder import FollowedDecoder, SharedDecoder
from lowbit.runtime.state.device_state import CacheSize, kv_pages, new_state
from lowbit.runtime.state.snapshots import Snapshots
from lowbit.runtime.weights.share import Share

T = TypeVar("T")
WAIT_S = 60.0


@dataclass(frozen=True)
class Meeting:
    ranks: int
    barrier: Barrier
    parts: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ThreadExchange:
    share: Share
    meeting: Meeting

    def total(self, partial: Tensor) -> Tensor:
        assert partial.dtype == torch.float32
        first, *others = self._all(partial)
        for other in others:
            first = first + other
        return first

    def side_by_side(self, part: Tensor, widths: tuple[int, ...]) -> Tensor:
        assert part.shape[1] == widths[self.share.rank]
        return torch.cat(self._all(part), dim=1)

    def _all(self, own: Tensor) -> list[Tensor]:
        self.meeting.parts[self.share.rank] = own
        self.meeting.barrier.wait(WAIT_S)
        found = [self.meeting.parts[rank] for rank in range(self.meeting.ranks)]
        self.meeting.barrier.wait(WAIT_S)
        return found


def on_each_rank(ranks: int, work: Callable[[Exchange], T]) -> list[T]:
    """Results of some work that every rank does."""
    meeting = Meeting(ranks, Barrier(ranks))

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        try:
            return work(ThreadExchange(Share(rank, ranks), meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))


class ThreadCrew:
    """Followers in threads, which get their tasks as bytes."""

    def __init__(self, followers: Sequence[Any]) -> None:
        self.followers = followers
        self.tasks: list[str] = []
        self._threads = [ThreadPoolExecutor(1) for _ in range(1 + len(followers))]

    def run(self, task: object, work: Callable[[], T]) -> T:
        content = encoded(task)
        self.tasks.append(type(task).__name__)
        first, *others = self._threads
        following = [
            thread.submit(_in_inference, partial(follower.run, decoded(content)))
            for thread, follower in zip(others, self.followers, strict=True)
        ]
        result = first.submit(_in_inference, work).result(WAIT_S)
        for each in following:
            each.result(WAIT_S)
        return result


def _in_inference(work: Callable[[], T]) -> T:
    with torch.inference_mode():
        return work()


def shared_runner(
    opened: OpenedModel,
    ranks: int,
    cache: CacheSize,
    cache_type: CacheType = FP32_CACHE,
    vocabulary: int = 261,
) -> tuple[Runner, ThreadCrew]:
    """A runner in FP32 whose decoder is shared by ranks, and the others of them."""
    check_ranks(opened, ranks)
    dtype = torch.float32

    def load(exchange: Exchange) -> Model[RankLinear]:
        return load_rank(shard_of(opened, exchange.share), exchange, dtype, cache.context)

    first, *others = on_each_rank(ranks, load)
    followers = []
    for model in others:
        state = new_state(model.config, cache.all_pages, cache.slots, dtype, "cpu", cache_type)
        snapshots = Snapshots(state.slots, cache.snapshots, staged=False)
        followers.append(FollowedDecoder(model, state, snapshots))
    crew = ThreadCrew(followers)
    runner = new_runner(SharedDecoder(first, crew), vocabulary, cache, dtype, "cpu", cache_type)
    runner.crew = crew
    return runner, crew


def linked_runner(
    opened: OpenedModel, ranks: int, cache: CacheSize, vocabulary: int = 261
) -> tuple[Runner, list[Runner], ThreadCrew]:
    """Runners that share a model as those on GPUs do, on the CPU: the first one, and the others."""
    check_ranks(opened, ranks)
    dtype = torch.float32

    def load(exchange: Exchange) -> tuple[Exchange, Model[RankLinear]]:
        shard = shard_of(opened, exchange.share)
        return exchange, load_rank(shard, exchange, dtype, cache.context)

    runners, shares = [], []
    for exchange, model in on_each_rank(ranks, load):
        decoder, part = cast("Decoder", model), opened.part_tokens("cpu")
        sizes = vocabulary, cache, dtype, "cpu"
        runners.append(new_runner(decoder, *sizes, part_tokens=part))
        shares.append(partial(_share_words, exchange))
    crew = ThreadCrew([FollowedRunner(runner) for runner in runners[1:]])
    for number, (runner, share) in enumerate(zip(runners, shares, strict=True)):
        runner.link = GpuLink(share, None if number else crew)
    runners[0].crew = crew
    return runners[0], runners[1:], crew


def add_drafter(runner: Runner, opened: OpenedModel, ranks: int) -> None:
    """Put the drafter of a model beside the first of its ranks, in FP32."""
    decoder: Any = runner.decoder
    lone, dtype = shard_of(opened, Share(0, ranks)).lone, torch.float32
    assert lone is not None
    drafter, rows = load_drafter(opened, "cpu", dtype, runner.context)
    target = load_target(getattr(decoder, "model", decoder), lone, "cpu", dtype)
    pages = kv_pages(drafter.config, runner.state.pages.count, FP32_CACHE, "cpu")
    sizes = runner.tables.shape[0], dtype
    runner.blocks = new_blocks(drafter, target, pages, rows, *sizes)


def _share_words(exchange: Any, words: Tensor) -> None:
    assert words.dtype == torch.int32
    words.copy_(exchange._all(words.clone())[0])
