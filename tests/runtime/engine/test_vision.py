"""Messages with images through `load`, against transformers, and the tower's cache."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import CheckpointError, RequestError, ResourceError
from lowbit.runtime.engine import vision as module
from lowbit.runtime.engine import vision_place
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.picture_threads import PictureThreads, PictureWork
from lowbit.runtime.engine.vision import CutPicture, Vision
from lowbit.runtime.engine.vision_place import VisionPlace
from lowbit.runtime.images import patches as patches_module
from lowbit.runtime.images import picture as picture_module
from lowbit.runtime.images.decode import decode_image
from lowbit.runtime.images.patches import ImagePatches, image_patches
from lowbit.runtime.images.picture import Picture
from lowbit.runtime.models.vision import OpenedTower, VisionTower, load_tower
from lowbit.runtime.text.chat import Message
from tests.runtime.images.pictures import picture, saved
from tests.seeing_chat import PAD, START, STOP, make_seeing_chat

CAT, DOG = saved(picture(300, 200, 1)), saved(picture(70, 130, 2))
GREEDY = lowbit.SamplingParams()


@pytest.fixture
def folder(seeing_folder: Path) -> Path:
    return seeing_folder


@pytest.fixture
def model(folder: Path) -> Model:
    return lowbit.load(folder, device="cpu", dtype=torch.float32, context=1024, max_sequences=2)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[ImagePatches]:
    """Images that the tower runs on."""
    found: list[ImagePatches] = []
    pieces = VisionTower.pieces

    def counted(tower: VisionTower, image: ImagePatches) -> Iterator[torch.Tensor | None]:
        found.append(image)
        return pieces(tower, image)

    monkeypatch.setattr(VisionTower, "pieces", counted)
    return found


def embedded(vision: Vision, picture: Picture) -> torch.Tensor:
    """Embeddings of a picture, which nobody else waits for."""
    for piece in vision.pieces(picture):
        if isinstance(piece, Future):
            assert wait([piece], 60).done  # the iterator raises its error, and forgets the work
        elif piece is not None:
            found = piece
    return found


def on_gpu(model: Model) -> Vision:
    """The vision of a model whose tower counts as one on a GPU."""
    vision = model.vision
    assert vision is not None
    vision.place = VisionPlace("cuda")
    vision._tower = load_tower(vision.opened, "cpu", torch.float32)
    return vision


def held_up(threads: PictureThreads) -> tuple[threading.Event, list[PictureWork[bool]]]:
    """Keep all threads busy until the event is set."""
    may = threading.Event()
    return may, [threads.begin(lambda _: may.wait(30), 0) for _ in range(threads.most)]


def user(*parts: str | bytes) -> Message:
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": each}
            if isinstance(each, str)
            else {"type": "image", "image": each}
            for each in parts
        ],
    }


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_logits_of_messages_with_images_are_those_of_transformers(
    folder: Path, model: Model
) -> None:
    from transformers import Qwen3_5ForConditionalGeneration

    theirs = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    made = model.encode_prompt([user("Which is ", CAT, "? And", DOG)], None)
    ids = torch.tensor([made.ids])
    patches = [image_patches(each, model.vision.input.settings) for each in (CAT, DOG)]  # type: ignore[union-attr]
    with torch.no_grad():
        expected = theirs(
            ids,
            pixel_values=torch.cat([each.values() for each in patches]),
            image_grid_thw=torch.tensor([[1, *each.grid] for each in patches]),
            mm_token_type_ids=(ids == PAD).int(),
        ).logits[0]
    found = model.logits(made.ids, made.images)
    apart = (found - expected).abs().max() / expected.abs().max()
    assert apart < 1e-4
    assert not torch.allclose(model.logits(made.ids), found, rtol=0.1)  # the images matter


def test_an_image_stands_between_its_markers(model: Model) -> None:
    made = model.encode_prompt([user("a", CAT, "b")], None)
    [span] = made.images
    assert (span.rows, span.columns) == (6, 9)
    assert made.ids[span.start - 1] == START
    assert made.ids[span.stop] == STOP
    assert made.ids[span.start : span.stop] == [PAD] * 54
    assert made.ids.count(PAD) == 54
    assert model.encode([user("a", CAT, "b")]) == made.ids


def test_a_growing_chat_runs_the_tower_once_for_each_image(
    model: Model, runs: list[ImagePatches]
) -> None:
    first = [user("What is ", CAT, "?")]
    one = model.generate(first, max_new_tokens=4, sampling=GREEDY)
    assert len(runs) == 1
    assert model.generate(first, max_new_tokens=4, sampling=GREEDY).token_ids == one.token_ids
    second = [*first, assistant("A cat."), user("And ", DOG, "?")]
    two = model.generate(second, max_new_tokens=4, sampling=GREEDY)
    assert len(runs) == 2
    assert two.timings.prompt_tokens == len(model.encode(second))


def test_the_cache_of_embeddings_is_bounded(model: Model, runs: list[ImagePatches]) -> None:
    vision = model.vision
    assert vision is not None
    cat, dog = (model.prompts.reader().read(each) for each in (CAT, DOG))
    kept = embedded(vision, cat)
    assert embedded(vision, cat) is kept
    vision.cache_bytes = kept.nbytes
    embedded(vision, dog)
    embedded(vision, dog)
    assert len(runs) == 2
    assert embedded(vision, cat) is not kept
    vision.cache_bytes = 0
    assert embedded(vision, dog).shape == (dog.rows * dog.columns, 64)


def test_no_weight_of_the_tower_is_read_before_the_first_image(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []

    def counted(
        opened: OpenedTower, device: str, dtype: torch.dtype, streamed: bool = False
    ) -> VisionTower:
        loads.append(device)
        return load_tower(opened, device, dtype, streamed)

    monkeypatch.setattr(module, "load_tower", counted)
    model.generate("Hi", max_new_tokens=2)
    assert not loads
    model.generate([user(CAT)], max_new_tokens=2)
    model.generate([user(DOG)], max_new_tokens=2)
    assert loads == ["cpu"]


def test_spelled_tokens_are_no_images(model: Model) -> None:
    made = model.encode_prompt([user("<|image_pad|>", CAT)], None)
    assert made.ids.count(PAD) == 54


def test_a_spelled_token_is_refused_where_it_would_be_one(folder: Path) -> None:
    loose = lowbit.load(folder, device="cpu", allow_control_tokens=True)
    with pytest.raises(RequestError, match="places for 2 images, the messages have 1"):
        loose.encode([user("<|image_pad|>", CAT)])


def test_a_model_without_tower_says_so(tmp_path: Path, make_qwen3_5: Any) -> None:
    packed = make_qwen3_5()
    (packed.folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    model = lowbit.load(packed.folder, device="cpu")
    assert model.vision is None
    with pytest.raises(RequestError, match=r"takes no images: .* has no vision tower"):
        model.generate([user("What is ", CAT)])


def test_a_tower_that_cannot_be_used_leaves_text(tmp_path: Path) -> None:
    folder = make_seeing_chat(tmp_path / "model")
    (folder / "preprocessor_config.json").unlink()
    model = lowbit.load(folder, device="cpu")
    assert len(model.generate("Hi", max_new_tokens=2).token_ids) == 2
    with pytest.raises(RequestError, match=r"takes no images: .* has no `preprocessor_config"):
        model.generate([user(CAT)])


def test_a_template_without_images_is_refused(tmp_path: Path) -> None:
    folder = make_seeing_chat(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].role }}")
    model = lowbit.load(folder, device="cpu")
    with pytest.raises(RequestError, match="places for 0 images, the messages have 1"):
        model.generate([user(CAT)])


def test_a_prompt_that_images_make_too_long_is_refused(folder: Path) -> None:
    model = lowbit.load(folder, device="cpu", context=60)
    with pytest.raises(RequestError, match="images take 108 tokens, the context is 60"):
        model.generate([user(CAT, CAT)])


def test_the_tower_goes_to_the_cpu_where_the_gpu_is_full(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert model.vision is not None
    model.vision.place = VisionPlace("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 2000))
    with monkeypatch.context() as full:
        full.setattr(vision_place, "free_bytes", lambda device: 1000)
        with pytest.raises(ResourceError, match="free on cpu"):
            model.generate([user(CAT)], max_new_tokens=2)
    assert model.vision.place.device == "cuda"  # is tried again
    assert embedded(model.vision, model.prompts.reader().read(CAT)).device.type == "cpu"
    assert "the vision tower runs on the CPU" in caplog.text
    assert (model.vision.place.device, model.vision.place.streamed) == ("cpu", False)
    assert "the GPU has not the " in model.vision.place.reason


def test_a_large_first_image_does_not_send_the_tower_to_the_cpu(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = model.vision
    assert vision is not None
    vision.place = VisionPlace("cuda")
    loads: list[str] = []

    def load(opened: OpenedTower, device: str, *rest: Any) -> VisionTower:
        loads.append(device)
        return load_tower(opened, "cpu", torch.float32)

    monkeypatch.setattr(module, "load_tower", load)
    room = vision_place.tower_memory(vision.opened, 200_000 // 256, torch.float32).whole
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (room, 2 * room))
    embedded(vision, model.prompts.reader().read(CAT))
    assert loads == ["cuda"]


def test_a_gpu_that_was_asked_for_is_not_left(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.vision is not None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 2000))
    for streamed in (False, True):
        model.vision.place = VisionPlace("cuda", streamed, asked=True)
        wanted = r"needs .* for the vision tower and an image, free on cuda: 0\.0 MB"
        with pytest.raises(ResourceError, match=wanted) as e:
            model.generate([user(CAT)], max_new_tokens=2)
        assert "--vision-device cpu" in str(e.value.hint)
    assert len(model.generate("Hi", max_new_tokens=2).token_ids) == 2


def test_a_streamed_tower_needs_the_memory_of_the_machine(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.vision is not None
    model.vision.place = VisionPlace("cuda", streamed=True)
    monkeypatch.setattr(
        vision_place, "free_bytes", lambda device: 1000 if device == "cpu" else 1 << 40
    )
    with pytest.raises(ResourceError, match=r"for the vision tower and an image, free on cpu"):
        model.generate([user(CAT)], max_new_tokens=2)
    assert len(model.generate("Hi", max_new_tokens=2).token_ids) == 2


def test_a_machine_without_room_refuses_the_image_and_answers_text(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.vision is not None
    tower = model.vision.opened.weight_bytes(torch.float32)
    image = model.vision.opened.working_bytes(54 * 4, torch.float32)
    for left, wanted in (
        (tower + image - 1, r"needs .* for the vision tower and an image, free on cpu"),
        (image - 1, r"an image of 216 patches needs .* in the vision tower, free on cpu"),
    ):
        monkeypatch.setattr(vision_place, "free_bytes", lambda device, left=left: left)
        with pytest.raises(ResourceError, match=wanted):
            model.generate([user(CAT)], max_new_tokens=2)
        assert len(model.generate("Hi", max_new_tokens=2).token_ids) == 2
        monkeypatch.setattr(vision_place, "free_bytes", lambda device: tower + image)
        embedded(model.vision, model.prompts.reader().read(DOG))  # it is loaded
    model.generate([user(CAT)], max_new_tokens=2)


def test_a_gpu_that_an_image_fills_says_so(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(VisionTower, "pieces", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 2000))
    on_gpu(model)
    with pytest.raises(ResourceError, match="an image of 216 patches needs") as e:
        model.generate([user(CAT)], max_new_tokens=2)
    assert "detail" in str(e.value.hint)


def test_an_image_that_vanishes_ends_its_request_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was whole when it was read; a tower that fails is the engine's error."""

    def fail(*_: Any) -> None:
        raise CheckpointError("the tower holds NaN")

    monkeypatch.setattr(module, "load_tower", fail)
    with pytest.raises(CheckpointError, match="holds NaN"):
        model.generate([user(CAT)], max_new_tokens=2)
    assert len(model.generate("Hi", max_new_tokens=2).token_ids) == 2


def test_a_picture_is_cut_once_by_another_thread(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noted(*given: Any, **named: Any) -> ImagePatches:
        threads.append(threading.current_thread().name)
        return image_patches(*given, **named)

    monkeypatch.setattr(module, "image_patches", noted)
    vision = on_gpu(model)
    cat = model.prompts.reader().read(CAT)
    begun = vision.prepare(cat)
    assert begun is not None
    assert vision.prepare(cat) is begun
    embedded(vision, cat)
    assert vision.prepare(cat) is None  # the cache has it
    assert [name[:15] for name in threads] == ["lowbit-pictures"]
    model.generate([user("See ", CAT, DOG, CAT)], max_new_tokens=2)
    assert len(threads) == 2
    del begun
    assert not list(vision._cuts)


def test_a_picture_is_decoded_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []

    def counted(content: bytes, *given: Any) -> Any:
        decoded.append(content)
        return decode_image(content, *given)

    for owner in (picture_module, patches_module):
        monkeypatch.setattr(owner, "decode_image", counted)
    for vision in (model.vision, on_gpu(model)):
        assert vision is not None
        vision._kept.clear()
        vision.known._files.clear()
        model.engine.forget()
        decoded.clear()
        photo = saved(picture(40, 50), "JPEG")
        model.generate([user("See ", CAT, photo, CAT)], max_new_tokens=2)
        assert decoded == [CAT, photo]


def test_few_pictures_are_cut_before_their_turn(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of requests that are gone do not count."""
    vision = on_gpu(model)
    cat, dog = (model.prompts.reader().read(each) for each in (CAT, DOG))
    monkeypatch.setattr(module, "AHEAD_BYTES", module._pixel_bytes(cat))
    monkeypatch.setattr(module, "AHEAD_SHARE", 1 << 40)  # no machine has that much
    begun = vision.prepare(cat)
    assert begun is not None
    cut = begun.result()
    assert isinstance(cut, CutPicture)
    assert cut.patches is not None
    assert cut.patches.pixels.nbytes == begun.size_bytes == module._pixel_bytes(cat)
    assert vision.prepare(dog) is None
    assert embedded(vision, dog).shape == (dog.rows * dog.columns, 64)
    del begun
    dog = model.prompts.reader().read(saved(picture(71, 130, 2)))
    assert vision.prepare(dog) is not None


def test_patches_of_a_picture_that_another_request_has_shown_are_not_kept(
    model: Model, runs: list[ImagePatches]
) -> None:
    vision = on_gpu(model)
    one, same = (model.prompts.reader().read(CAT) for _ in range(2))
    first = vision.prepare(one)
    work = vision.pieces(one)
    while isinstance(next(work), Future):
        pass
    second = vision.prepare(same)  # while the tower runs for the first
    assert None is not first is not second is not None
    second.result()
    for _ in work:
        pass
    for each in (first, second):
        cut = each.result()
        assert isinstance(cut, CutPicture)
        assert cut.patches is None
    assert embedded(vision, one) is embedded(vision, same)
    assert len(runs) == 1
    assert not list(vision._cuts)


def test_a_picture_that_is_gone_is_not_cut(model: Model) -> None:
    vision = on_gpu(model)
    goes_on, busy = held_up(vision._cutters)
    cat, dog = (model.prompts.reader().read(each) for each in (CAT, DOG))
    gone, kept = vision.prepare(cat), vision.prepare(dog)
    assert kept is not None
    assert len(vision._cuts) == 2
    del gone
    assert len(vision._cuts) == 1
    goes_on.set()
    assert all(each.result() for each in busy)
    assert isinstance(kept.result(), CutPicture)


def test_two_requests_with_one_picture_have_it_cut_once(model: Model) -> None:
    """It goes on for the second where the first has gone."""
    vision = on_gpu(model)
    goes_on, busy = held_up(vision._cutters)
    first, second = (model.prompts.reader().read(CAT) for _ in range(2))
    begun, same = (vision.prepare(each) for each in (first, second))
    assert begun is same is not None
    del begun, first
    goes_on.set()
    assert all(each.result() for each in busy)
    assert embedded(vision, second).shape == (second.rows * second.columns, 64)
    assert same.done()
    assert not list(vision._cuts)
