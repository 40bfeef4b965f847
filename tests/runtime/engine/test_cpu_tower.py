"""A vision tower on a CPU: a thread runs it beside the engine's steps."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import ResourceError
from lowbit.runtime.engine import vision as module
from lowbit.runtime.engine import vision_place
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.vision_place import VisionPlace
from lowbit.runtime.images.patches import ImagePatches
from lowbit.runtime.models.vision import VisionTower
from tests.runtime.engine.test_vision import CAT, DOG, GREEDY, embedded, on_gpu, user
from tests.runtime.images.pictures import picture, saved


@pytest.fixture
def model(seeing_folder: Path) -> Model:
    options = lowbit.LoadOptions(device="cpu", dtype=torch.float32, context=1024, max_sequences=2)
    return lowbit.load(seeing_folder, options)


def test_a_tower_on_a_cpu_runs_in_a_thread_of_its_own(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures follow each other in the order in which they were asked for."""
    expected = [embedded(on_gpu(model), model.prompts.reader().read(each)) for each in (CAT, DOG)]
    vision = model.vision
    assert vision is not None
    vision._kept.clear()
    vision.place, vision._tower = VisionPlace("cpu"), None
    threads: list[tuple[str, int]] = []
    pieces = VisionTower.pieces

    def noted(tower: VisionTower, image: ImagePatches) -> Iterator[torch.Tensor | None]:
        threads.append((threading.current_thread().name[:12], image.rows))
        return pieces(tower, image)

    monkeypatch.setattr(VisionTower, "pieces", noted)
    cat, dog = (model.prompts.reader().read(each) for each in (CAT, DOG))
    works = [vision.prepare(each) for each in (cat, dog)]
    assert vision.prepare(cat) is works[0]
    for work, each in zip(works, expected, strict=True):
        assert work is not None
        found = work.result()
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, each)
        assert work.size_bytes == found.nbytes
    assert threads == [("lowbit-tower", cat.rows), ("lowbit-tower", dog.rows)]
    assert embedded(vision, dog) is works[1].result()  # type: ignore[union-attr]


def test_a_text_is_answered_while_the_tower_runs_on_the_cpu(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that has come later, and with the same bits for the picture."""
    seen = [user("See ", CAT, DOG, saved(picture(200, 80, 3)))]
    expected = model.generate(seen, max_new_tokens=4, sampling=GREEDY).token_ids
    assert model.vision is not None
    model.vision._kept.clear()
    model.engine.forget()
    begun, may = threading.Event(), threading.Event()
    pieces = VisionTower.pieces

    def held(tower: VisionTower, image: ImagePatches) -> Iterator[torch.Tensor | None]:
        begun.set()
        assert may.wait(30)
        yield from pieces(tower, image)

    monkeypatch.setattr(VisionTower, "pieces", held)
    made = model.encode_prompt(seen, None)
    request = model.request(made.ids, images=made.images, max_new_tokens=4, sampling=GREEDY)
    late = model.engine.submit(request)
    while not begun.is_set():
        assert model.engine.step()
    text = model.generate("Hi", max_new_tokens=9, sampling=GREEDY)
    assert len(text.token_ids) > 1
    assert not late.begun
    assert late.queued_s is None  # it holds no row
    may.set()
    assert late.result() == expected


def test_few_embeddings_are_made_before_their_turn(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = model.vision
    assert vision is not None
    cat, dog = (model.prompts.reader().read(each) for each in (CAT, DOG))
    monkeypatch.setattr(module, "AHEAD_BYTES", vision._embedding_bytes(cat))
    begun = vision.prepare(cat)
    assert begun is not None
    assert vision.prepare(dog) is not None  # the machine has memory
    monkeypatch.setattr(module, "AHEAD_SHARE", 1 << 40)  # no machine has that much
    assert vision.prepare(dog) is None
    assert embedded(vision, dog).shape == (dog.rows * dog.columns, 64)
    del begun
    assert vision.prepare(cat) is not None


@pytest.mark.parametrize("ending", ["cancelled", "stopped", "main thread ended"])
def test_a_tower_that_nobody_waits_for_ends_at_its_next_piece(
    model: Model, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    vision = model.vision
    assert vision is not None
    begun, goes_on, ended = (threading.Event() for _ in range(3))

    def endless(tower: VisionTower, image: ImagePatches) -> Iterator[None]:
        try:
            begun.set()
            goes_on.wait(30)
            while True:
                yield None
        finally:
            ended.set()

    monkeypatch.setattr(VisionTower, "pieces", endless)
    work = vision.pieces(model.prompts.reader().read(CAT))
    assert isinstance(next(work), Future)
    assert begun.wait(30)
    if ending == "cancelled":
        del work
    elif ending == "stopped":
        vision.stop()
    else:
        gone = threading.Thread()
        monkeypatch.setattr(threading, "main_thread", lambda: gone)
    goes_on.set()
    assert ended.wait(30)


def test_a_cancelled_request_leaves_the_tower_at_once(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind Ctrl-C in a chat, where no step follows."""
    begun, ended = threading.Event(), threading.Event()

    def endless(tower: VisionTower, image: ImagePatches) -> Iterator[None]:
        begun.set()
        try:
            while True:
                yield None
        finally:
            ended.set()

    monkeypatch.setattr(VisionTower, "pieces", endless)
    made = model.encode_prompt([user(CAT)], None)
    handle = model.engine.submit(model.request(made.ids, images=made.images))
    while not begun.is_set():
        assert model.engine.step()
    handle.cancel()
    assert ended.wait(30)


def test_an_image_that_was_too_large_is_tried_again(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = model.vision
    assert vision is not None
    cat = model.prompts.reader().read(CAT)
    with monkeypatch.context() as full:
        full.setattr(vision_place, "free_bytes", lambda device: 0)
        work = vision.prepare(cat)
        for _ in range(2):
            with pytest.raises(ResourceError, match="for the vision tower"):
                embedded(vision, cat)
    assert work is not None
    assert len(embedded(vision, cat)) == cat.rows * cat.columns


def test_two_prompts_may_wait_for_one_tower(model: Model) -> None:
    vision = model.vision
    assert vision is not None
    cat, dog = (model.prompts.reader().read(each) for each in (CAT, DOG))
    both = [vision.pieces(cat), vision.pieces(dog)]
    made: list[torch.Tensor] = []
    while len(made) < 2:
        for pieces in both:
            each = next(pieces, None)
            if isinstance(each, Future):
                wait([each], 30)  # to ask again at once would take the thread's time
            elif each is not None:
                made.append(each)
    assert sorted(len(each) for each in made) == sorted(
        each.rows * each.columns for each in (cat, dog)
    )
