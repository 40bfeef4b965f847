"""Embeddings of a prompt's images: made once, in pieces, by threads that nobody else waits for."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.errors import LowbitError, RequestError, ResourceError
from lowbit.runtime.engine import engine
from lowbit.runtime.engine.prompt_images import PromptImages, images_of
from lowbit.runtime.engine.span import ImageSpan
from lowbit.runtime.images.positions import positions_of
from tests.runtime.engine.small_engine import assert_all_free
from tests.runtime.engine.test_images import (
    CAT,
    DOG,
    DOT,
    PROMPTS,
    STRIP,
    TALL,
    asked,
    said,
    submitted,
)
from tests.runtime.image_prompts import END, Hub, Picture, Prompt

PIECES = 3  # of a tower, before its last
SetChunk = Callable[[int], None]


class Tower:
    """Makes the embeddings of a span in pieces, once `cut` is done, and counts how often."""

    def __init__(
        self, span: ImageSpan, failure: Exception | None = None, cut: Future[Any] | None = None
    ) -> None:
        self.span, self.failure, self.cut = span, failure, cut
        self.calls = self.prepared = 0
        self.made = False

    def is_made(self) -> bool:
        return self.made

    def prepare(self) -> Future[Any] | None:
        self.prepared += 1
        return self.cut

    def __call__(self) -> Iterator[torch.Tensor | Future[Any] | None]:
        self.calls += 1
        while self.cut is not None and not self.cut.done():
            yield self.cut
        for _ in range(PIECES):
            yield None
        if self.failure is not None:
            raise self.failure
        assert isinstance(self.span.embeddings, torch.Tensor)
        yield self.span.embeddings


def with_towers(
    prompt: Prompt, failure: Exception | None = None, cut: Future[Any] | None = None
) -> tuple[Prompt, tuple[Tower, ...]]:
    towers = tuple(Tower(span, failure, cut) for span in prompt.spans)
    pairs = zip(prompt.spans, towers, strict=True)
    spans = tuple(replace(span, embeddings=tower) for span, tower in pairs)
    return replace(prompt, spans=spans), towers


def test_embeddings_are_made_once_and_only_where_the_cache_has_none(
    hub: Hub, fresh: Callable[..., lowbit.Model], set_chunk: SetChunk
) -> None:
    set_chunk(100)  # the first lies in two chunks
    plain = hub.prompt(70, [END], Picture(12, 10), 70, [END], DOG, 9)
    lazy, towers = with_towers(plain)
    expected, model = said(submitted(fresh(), plain)), fresh()
    for calls in ([1, 1], [1, 2]):
        handle = submitted(model, lazy)
        assert said(handle) == expected
        assert [tower.calls for tower in towers] == calls
        assert handle._sequence.images is not None
        assert not handle._sequence.images._made


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (RequestError("no such picture"), RequestError),
        (MemoryError(), ResourceError),
        (OSError(5, "unreadable", "x.png"), LowbitError),
    ],
    ids=["request", "memory", "file"],
)
def test_an_image_that_cannot_be_embedded_ends_its_own_request_alone(
    failure: Exception,
    error: type[LowbitError],
    hub: Hub,
    fresh: Callable[..., lowbit.Model],
) -> None:
    model, text = fresh(), hub.prompt(20)
    expected = said(submitted(fresh(), text, 20))
    beside = model.engine.submit(asked(text, 20))
    begun = next(beside)
    broken, _ = with_towers(hub.prompt(*PROMPTS["one"]), failure)
    with pytest.raises(error):
        submitted(model, broken)
    assert (begun, *beside) == expected[0]
    assert submitted(model, hub.prompt(*PROMPTS["one"])).finish_reason == "length"


def test_a_tower_has_as_much_time_as_a_chunk(hub: Hub, fresh: Callable[..., lowbit.Model]) -> None:
    model, seen = fresh(), list[bool]()
    lazy, _ = with_towers(hub.prompt(*PROMPTS["one"]))

    class Watched(Tower):
        def __call__(self) -> Iterator[torch.Tensor | Future[Any] | None]:
            for piece in super().__call__():
                seen.append(model.engine.in_prompt)
                yield piece

    [span] = hub.prompt(*PROMPTS["one"]).spans
    submitted(model, replace(lazy, spans=(replace(span, embeddings=Watched(span)),)))
    assert seen == [True] * (PIECES + 1)
    assert not model.engine.in_prompt


def test_others_decode_between_two_pieces_of_a_tower(
    hub: Hub, fresh: Callable[..., lowbit.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CPU_TURN_S", -1.0)
    plain, text = hub.prompt(*PROMPTS["one"]), hub.prompt(20)
    expected = [said(submitted(fresh(), each, 20)) for each in (text, plain)]
    model = fresh()
    lazy, [tower] = with_towers(plain)
    first = model.engine.submit(asked(text, 20))
    next(first)
    second = model.engine.submit(asked(lazy, 20))
    for count in range(2, PIECES + 2):
        model.engine.step()
        assert len(first.output) == count
        assert tower.calls == 1
    second.result()
    first.result()
    assert [said(first), said(second)] == expected


def test_a_prompt_waits_for_threads_and_nobody_for_it(
    hub: Hub, fresh: Callable[..., lowbit.Model]
) -> None:
    plain, texts = hub.prompt(*PROMPTS["one"]), [hub.prompt(20, seed=n) for n in (1, 2)]
    expected = [said(submitted(fresh(), each)) for each in (*texts, plain)]
    model, cut = fresh(), Future[Any]()
    lazy, [tower] = with_towers(plain, cut=cut)
    first = model.engine.submit(asked(texts[0]))
    next(first)
    late = model.engine.submit(asked(lazy))
    second = model.engine.submit(asked(texts[1]))
    second.result()
    first.result()
    assert (tower.prepared, tower.calls) == (1, 0)
    assert not late.begun
    assert model.engine.step()  # it waits for a while
    assert model.engine.step()
    assert [each.phase for each in model.engine.scheduler.queued] == ["waiting"]
    cut.set_result(None)
    late.result()
    assert [said(each) for each in (first, second, late)] == expected


def test_a_prompt_that_waits_for_threads_can_be_cancelled(
    hub: Hub, fresh: Callable[..., lowbit.Model]
) -> None:
    model = fresh()
    lazy, [tower] = with_towers(hub.prompt(*PROMPTS["one"]), cut=Future())
    late = model.engine.submit(asked(lazy))
    assert model.engine.step()
    late.cancel()
    assert not model.engine.step()
    assert late.finish_reason == "cancelled"
    assert tower.calls == 0
    assert_all_free(model.engine)


def test_a_prompt_whose_tower_runs_in_a_thread_can_be_cancelled(
    hub: Hub, fresh: Callable[..., lowbit.Model]
) -> None:
    model, run = fresh(), Future[Any]()

    class InThread(Tower):
        def __call__(self) -> Iterator[torch.Tensor | Future[Any] | None]:
            self.calls += 1
            while True:
                yield run

    prompt = hub.prompt(*PROMPTS["one"])
    [span] = prompt.spans
    tower = InThread(span)
    late = model.engine.submit(asked(replace(prompt, spans=(replace(span, embeddings=tower),))))
    assert model.engine.step()
    assert model.engine.step()
    assert tower.calls == 1
    late.cancel()
    assert not model.engine.step()
    assert late.finish_reason == "cancelled"
    assert_all_free(model.engine)


def test_a_lone_prompt_can_be_cancelled_between_two_pieces_of_a_tower(
    hub: Hub, fresh: Callable[..., lowbit.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CPU_TURN_S", -1.0)
    model = fresh()
    lazy, [tower] = with_towers(hub.prompt(*PROMPTS["one"]))
    alone = model.engine.submit(asked(lazy))
    assert model.engine.step()
    assert tower.calls == 1
    assert not alone.begun
    alone.cancel()
    assert not model.engine.step()
    assert_all_free(model.engine)


def test_a_tower_that_is_left_in_the_middle_leaves_nothing(
    hub: Hub, fresh: Callable[..., lowbit.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CPU_TURN_S", -1.0)
    model, text = fresh(), hub.prompt(20)
    first = model.engine.submit(asked(text, 40))
    next(first)
    lazy, [tower] = with_towers(hub.prompt(*PROMPTS["one"]))
    second = model.engine.submit(asked(lazy))
    model.engine.step()
    model.engine.step()
    second.cancel()
    model.engine.step()
    images = second._sequence.images
    assert tower.calls == 1
    assert images is not None
    assert images._work is None
    first.result()
    assert said(submitted(model, lazy)) == said(submitted(fresh(), hub.prompt(*PROMPTS["one"])))
    assert_all_free(model.engine)


def test_images_are_prepared_a_few_ahead_and_never_those_of_the_cache(
    hub: Hub, fresh: Callable[..., lowbit.Model]
) -> None:
    model, cut = fresh(), Future[Any]()
    lazy, towers = with_towers(hub.prompt(20, CAT, [END], STRIP, 70, DOT, 3, TALL, 2), cut=cut)
    handle = model.engine.submit(asked(lazy, 2))
    for _ in range(2):
        model.engine.scheduler.admit()
        model.engine.scheduler.prepare_images()
        assert [tower.prepared for tower in towers] == [1, 1, 0, 0]
        if not cut.done():
            cut.set_result("patches")
    handle.result()
    assert [(tower.prepared, tower.calls) for tower in towers] == [(1, 1)] * 4
    known, [tower] = with_towers(hub.prompt(70, [END], CAT, 70, [END], 9))
    for _ in range(2):
        submitted(model, known, 2)
        assert (tower.prepared, tower.calls) == (1, 1)


def test_a_prompt_waits_for_all_embeddings_that_threads_make(
    hub: Hub, fresh: Callable[..., lowbit.Model]
) -> None:
    """A few at a time, while others pass it."""
    plain = hub.prompt(20, CAT, [END], STRIP, 70, DOT, 3, TALL, 2)
    expected, model = said(submitted(fresh(), plain)), fresh()
    towers = tuple(Tower(each, cut=Future()) for each in plain.spans)
    pairs = zip(plain.spans, towers, strict=True)
    spans = tuple(replace(span, embeddings=tower) for span, tower in pairs)
    late = model.engine.submit(asked(replace(plain, spans=spans)))
    for count, tower in enumerate(towers, start=2):
        assert said(submitted(model, hub.prompt(20, seed=count), 3))
        assert [each.prepared for each in towers] == [1] * min(count, 4) + [0] * (4 - count)
        assert [each.phase for each in model.engine.scheduler.queued] == ["waiting"]
        assert tower.cut is not None
        tower.cut.set_result(tower.span.embeddings)
    late.result()
    assert said(late) == expected
    assert [tower.calls for tower in towers] == [1] * 4
    assert late._sequence.images is not None
    assert not late._sequence.images._begun


def test_clients_take_turns_with_their_images(hub: Hub, fresh: Callable[..., lowbit.Model]) -> None:
    """One that sends many prompts holds up its own alone, and nobody those that are made."""
    model = fresh()
    plain = hub.prompt(20, CAT, [END], STRIP, 70, DOT, 3)
    towers: list[tuple[Tower, ...]] = []

    def asks(client: str) -> lowbit.Handle:
        made = tuple(Tower(each, cut=Future()) for each in plain.spans)
        towers.append(made)
        pairs = zip(plain.spans, made, strict=True)
        spans = tuple(replace(span, embeddings=tower) for span, tower in pairs)
        request = replace(asked(replace(plain, spans=spans)), client=client)
        return model.engine.submit(request)

    def begun() -> list[int]:
        assert model.engine.step()
        return [sum(each.prepared for each in made) for made in towers]

    handles = [asks(client) for client in ("a", "a", "a")]
    assert begun() == [2, 2, 0]
    handles += [asks(client) for client in ("a", "b")]
    assert begun() == [2, 2, 0, 0, 0]
    for tower in towers[0][:2]:
        assert tower.cut is not None
        tower.cut.set_result(tower.span.embeddings)
    assert begun() == [3, 2, 0, 0, 2]  # `b` comes before the third of `a`
    known = asks("a")
    for tower in towers[-1]:
        tower.made, tower.cut = True, None
    known.result()
    assert not any(each.begun for each in handles)
    for made in towers:
        for tower in made:
            if tower.cut is not None and not tower.cut.done():
                tower.cut.set_result(tower.span.embeddings)
    expected = said(submitted(fresh(), plain))
    for each in handles:
        each.result()
        assert said(each) == expected


def test_an_image_without_memory_is_begun_once_there_is_some(
    hub: Hub, fresh: Callable[..., lowbit.Model]
) -> None:
    """Until then its prompt may have room, or nobody would free any; those behind are not asked."""
    plain = hub.prompt(20, CAT, [END], STRIP, 9)
    expected, model = said(submitted(fresh(), plain)), fresh()
    scheduler = model.engine.scheduler
    asks = [with_towers(plain) for _ in range(2)]
    handles = [model.engine.submit(asked(prompt)) for prompt, _ in asks]
    towers = [tower for _, each in asks for tower in each]
    scheduler.admit()
    images = [each.images for each in scheduler.waiting if each.images is not None]
    for count in (1, 2):
        scheduler.prepare_images()
        assert [tower.prepared for tower in towers] == [count, 0, 0, 0]
        assert [(each.full, each.late) for each in images] == [(True, False)] * 2
    for tower in towers:
        tower.cut = Future()
    scheduler.prepare_images()
    assert [tower.prepared for tower in towers] == [3, 1, 1, 1]
    assert [(each.full, each.late) for each in images] == [(False, True)] * 2
    assert said(submitted(model, hub.prompt(20, seed=1), 3))
    assert [each.phase for each in scheduler.queued] == ["waiting"] * 2
    for tower in towers:
        assert tower.cut is not None
        tower.cut.set_result(tower.span.embeddings)
    for handle in handles:
        handle.result()
        assert said(handle) == expected


def test_images_whose_turn_has_come_are_not_begun_again(
    hub: Hub, fresh: Callable[..., lowbit.Model]
) -> None:
    lazy, towers = with_towers(hub.prompt(20, CAT, [END], STRIP, 70, DOT, 3))
    handle = submitted(fresh(), lazy)
    assert [(tower.prepared, tower.calls) for tower in towers] == [(1, 1), (1, 1), (1, 1)]
    assert handle._sequence.images is not None
    assert not handle._sequence.images._ahead


def test_a_prompt_whose_images_come_between_two_looks_is_not_refused(
    hub: Hub, fresh: Callable[..., lowbit.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cut = fresh(), Future[Any]()
    lazy, _ = with_towers(hub.prompt(*PROMPTS["one"]), cut=cut)
    wait_for_images = model.engine.scheduler.wait_for_images

    def later(seconds: float) -> bool:
        if not cut.done():
            cut.set_result(None)
        return wait_for_images(seconds)

    monkeypatch.setattr(model.engine.scheduler, "wait_for_images", later)
    assert submitted(model, lazy).finish_reason == "length"


def test_a_thread_that_fails_ends_its_own_request_alone(
    hub: Hub, fresh: Callable[..., lowbit.Model]
) -> None:
    model, cut = fresh(), Future[Any]()
    cut.set_exception(MemoryError())
    lazy, _ = with_towers(hub.prompt(*PROMPTS["one"]), MemoryError(), cut)
    with pytest.raises(ResourceError):
        submitted(model, lazy)
    assert said(submitted(model, hub.prompt(20)))


def test_nothing_more_is_begun_for_a_prompt_that_fails(
    hub: Hub, fresh: Callable[..., lowbit.Model]
) -> None:
    model = fresh()
    plain = hub.prompt(20, CAT, [END], STRIP, 70, DOT, 3, TALL, 2)
    towers = [Tower(each, MemoryError(), Future()) for each in plain.spans]
    pairs = zip(plain.spans, towers, strict=True)
    spans = tuple(replace(span, embeddings=tower) for span, tower in pairs)
    late = model.engine.submit(asked(replace(plain, spans=spans)))
    assert model.engine.step()
    for tower in towers[:2]:
        assert tower.cut is not None
        tower.cut.set_exception(MemoryError())
    with pytest.raises(ResourceError):
        late.result()
    assert [tower.prepared for tower in towers] == [1, 1, 0, 0]
    assert_all_free(model.engine)


def test_embeddings_of_another_form_are_refused(
    hub: Hub, fresh: Callable[..., lowbit.Model]
) -> None:
    prompt = hub.prompt(*PROMPTS["one"])
    [span] = prompt.spans
    tower = Tower(replace(span, embeddings=torch.zeros(4, 64)))
    wrong = replace(prompt, spans=(replace(span, embeddings=tower),))
    with pytest.raises(RequestError, match=r"embeddings \[4, 64\] of torch.float32, expected"):
        submitted(fresh(), wrong)


def test_what_is_done_for_images_grows_with_their_number() -> None:
    """A prompt may have thousands, and all other requests wait for what is done in a step."""
    looks = Counter[int]()

    class Work(Future[Tensor]):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.count = count

        def done(self) -> bool:
            looks[self.count] += 1
            return super().done()

    @dataclass
    class Source:
        count: int

        def is_made(self) -> bool:
            return False

        def prepare(self) -> Work:
            work = Work(self.count)
            work.set_result(torch.zeros(1, 4))
            return work

        def __call__(self) -> Iterator[Tensor]:
            yield torch.zeros(1, 4)

    for count in (100, 200):
        spans = tuple(ImageSpan(at, 1, 1, Source(count), bytes([at])) for at in range(count))
        images = images_of(spans, count + 1, 4)
        assert images is not None
        images.prepare(0)
        while images.late:
            images.begin_ahead()
        assert images.make(0, count)
    assert 0 < looks[200] <= 2.1 * looks[100]


@pytest.mark.parametrize("left_in", ["is_made", "prepare"])
def test_a_request_may_be_cancelled_at_any_point_of_a_step(
    left_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread of its client; a step that failed would end all requests."""
    pair = [ImageSpan(at, 1, 1, torch.zeros(1, 4), b"") for at in (0, 1)]
    spans = tuple(replace(each, embeddings=Tower(each, cut=Future())) for each in pair)
    images = PromptImages(spans, positions_of(3, spans), 4)
    found = getattr(Tower, left_in)

    def leaving(tower: Tower) -> object:
        images.leave()
        return found(tower)

    monkeypatch.setattr(Tower, left_in, leaving)
    for ask in (lambda: images.late, images.begin_ahead):
        images.prepare(0)
        ask()
    images.prepare(0)
    assert not images.make(0, 2, others=True)
