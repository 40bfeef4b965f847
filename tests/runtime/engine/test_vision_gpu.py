"""Conversations with images on a GPU: its tower and model against those of a CPU in FP32."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.engine.load_options import VISION_DEVICES
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.vision_place import VisionPlace
from lowbit.runtime.images.patches import ImagePatches
from lowbit.runtime.models.vision import VisionTower
from tests.runtime.engine.test_vision import CAT, DOG, GREEDY, assistant, user

pytestmark = pytest.mark.gpu


def test_images_of_messages_are_those_of_a_cpu(seeing_folder: Path) -> None:
    model = lowbit.load(seeing_folder, device="cuda", context=500)
    exact = lowbit.load(seeing_folder, device="cpu", dtype=torch.float32, context=500)
    rounded = lowbit.load(seeing_folder, device="cpu", context=500)
    messages = [user("Look: ", CAT, " and ", DOG, "!")]
    made = [each.encode_prompt(messages, None) for each in (model, exact, rounded)]
    found, right, near = (
        each.logits(one.ids, one.images).double().cpu()
        for each, one in zip((model, exact, rounded), made, strict=True)
    )
    assert model.vision is not None
    assert model.vision._tower is not None
    assert model.vision._tower.patches.weight.is_cuda
    assert (found - right).norm() < 1.5 * (near - right).norm()


def test_the_tower_runs_once_a_picture(seeing_folder: Path) -> None:
    model = lowbit.load(seeing_folder, device="cuda", context=500)
    messages = [user(CAT, "x" * 80)]
    first = model.generate(messages, sampling=GREEDY, max_new_tokens=20)
    again = model.generate(messages, sampling=GREEDY, max_new_tokens=20)
    assert again.token_ids == first.token_ids
    assert model.vision is not None
    tower, model.vision._tower = model.vision._tower, None
    messages += [assistant("Well."), user("And?")]
    turn = model.generate(messages, sampling=GREEDY, max_new_tokens=20)
    assert turn.timings.reused_tokens > 80
    assert tower is not None
    assert model.vision._tower is None


def test_others_decode_while_a_picture_is_prepared(seeing_folder: Path) -> None:
    """Their tokens are those that they have alone, and so are those of the picture's answer."""
    model = lowbit.load(seeing_folder, device="cuda", context=500, max_sequences=4)
    asked = [[user("Count to ten.")], [user("See ", CAT, DOG)], [user("And ", DOG, "?")]]
    alone = [model.generate(each, sampling=GREEDY, max_new_tokens=40) for each in asked]
    for _ in range(3):  # graphs are recorded in the second
        model.engine.forget()
        assert model.vision is not None
        model.vision._kept.clear()
        handles = []
        for messages in asked:
            made = model.encode_prompt(messages, None)
            request = Request(tuple(made.ids), GREEDY, 40, model.stop_ids, images=made.images)
            handles.append(model.engine.submit(request))
            next(handles[0], None)
        for handle, expected in zip(handles, alone, strict=True):
            assert handle.result() == expected.token_ids


def test_the_tower_runs_where_it_is_asked_for(seeing_folder: Path) -> None:
    messages = [user("Look: ", CAT, " and ", DOG, "!")]
    found = {}
    for asked in VISION_DEVICES:
        model = lowbit.load(seeing_folder, device="cuda", context=500, vision_device=asked)
        made = model.encode_prompt(messages, None)
        found[asked] = model.logits(made.ids, made.images)
        assert model.vision is not None
        assert model.vision._tower is not None
        assert model.vision._tower.device.type == ("cpu" if asked == "cpu" else "cuda")
        assert model.vision.place.device == model.vision._tower.device.type
    assert torch.equal(found["auto"], found["cuda"])
    apart = (found["cpu"] - found["cuda"]).norm() / found["cuda"].norm()
    assert 0 < apart < 0.1


def test_a_streamed_tower_gives_the_same_answer(seeing_folder: Path) -> None:
    messages = [user("Look: ", CAT, " and ", DOG, "!")]
    model = lowbit.load(seeing_folder, device="cuda", context=500)
    first = model.generate(messages, sampling=GREEDY, max_new_tokens=20)
    other = lowbit.load(seeing_folder, device="cuda", context=500)
    assert other.vision is not None
    other.vision.place = VisionPlace("cuda", streamed=True)
    again = other.generate(messages, sampling=GREEDY, max_new_tokens=20)
    assert again.token_ids == first.token_ids


def test_text_passes_a_picture_whose_tower_runs_on_the_cpu(
    seeing_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lowbit.load(seeing_folder, device="cuda", context=500, vision_device="cpu")
    seen = [user("See ", CAT, DOG)]
    expected = model.generate(seen, sampling=GREEDY, max_new_tokens=9).token_ids
    model.engine.forget()
    assert model.vision is not None
    model.vision._kept.clear()
    may = threading.Event()
    pieces = VisionTower.pieces

    def held(tower: VisionTower, image: ImagePatches) -> Iterator[torch.Tensor | None]:
        assert may.wait(60)
        yield from pieces(tower, image)

    monkeypatch.setattr(VisionTower, "pieces", held)
    made = model.encode_prompt(seen, None)
    request = Request(tuple(made.ids), GREEDY, 9, model.stop_ids, images=made.images)
    late = model.engine.submit(request)
    assert len(model.generate("Hi", sampling=GREEDY, max_new_tokens=9).token_ids) > 1
    assert not late.begun
    may.set()
    assert late.result() == expected
