"""Images of a model that two ranks share: on two GPUs, or on one that takes turns."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import ResourceError
from lowbit.runtime.backends import symmetric
from lowbit.runtime.engine.image_input import EncodedPrompt
from lowbit.runtime.engine.load_options import Mode
from lowbit.runtime.engine.plan import CHUNK
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.engine.vision_place import VisionPlace
from lowbit.runtime.images.patches import ImagePatches
from lowbit.runtime.models.vision import VisionTower
from tests.reading import FOLDER, QUESTION, asked, exact, framed, pictures, read, saved, words

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
GPUS = (0, 1) if torch.cuda.device_count() > 1 else (0, 0)
SIZES: dict[str, Any] = {
    **{"device": DEVICE, "context": 2048, "max_sequences": 8},
    **{"quantize": "int4", "group_size": 64},
}
TWO: dict[str, Any] = {"tensor_parallel": 2, "devices": GPUS}
SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {"kv_cache": "bf16"},
    "int8": {"kv_cache": "int8", "activations": "int8"},
}
GREEDY = lowbit.SamplingParams(logprobs=2)
CLOSE = 0.03  # of the largest logit: what sums in another order may change in BF16
COUNT = 24
ENOUGH = 95  # of 100 words: two processes of a CPU read 99, and 98 with inputs in eight bits
ENDED = r"rank 1 \(process \d+\) ended while running steps: signal SIGKILL"
Said = tuple[list[int], list[Any]]


def shared(speculate: Mode = "off", **more: Any) -> lowbit.Model:
    """The model that reads, on two ranks."""
    return lowbit.load(FOLDER, **{**SIZES, **TWO, "speculate": speculate, **more})


def prompts(model: lowbit.Model) -> list[EncodedPrompt]:
    """Text; a word; two words apart, the last one large; a large word that a chunk ends in."""
    pair = [
        {"type": "image", "image": saved(pictures()[3])},
        {"type": "text", "text": QUESTION},
        {"type": "image", "image": saved(framed(pictures()[4], 512, 480))},
    ]
    messages: list[Any] = [
        "Once upon a time",
        asked(pictures()[0]),
        [{"role": "user", "content": pair}],
        asked(framed(pictures()[5], 512, 512)),
    ]
    found = [model.encode_prompt(each, None) for each in messages]
    span = found[-1].images[0]
    before = model.tokenizer.encode("What does it say? " * 200)[: CHUNK - 100 - span.start]
    across = replace(span, start=span.start + len(before))
    assert across.start < CHUNK < across.stop
    found[-1] = EncodedPrompt([*before, *found[-1].ids], (across,))
    return found


def submit(model: lowbit.Model, prompt: EncodedPrompt) -> Handle:
    ends = model.stop_ids
    request = Request(tuple(prompt.ids), GREEDY, COUNT, ends, images=prompt.images)
    return model.engine.submit(replace(request, message_ends=ends))


def said(handle: Handle) -> Said:
    """Tokens and the bits of their log-probabilities."""
    return list(handle.result()), list(handle.log_probabilities)


def alone(model: lowbit.Model, prompt: EncodedPrompt) -> Said:
    model.engine.forget()
    return said(submit(model, prompt))


def place(model: lowbit.Model, where: VisionPlace) -> None:
    """Let the tower run in another place, where it has run on nothing."""
    vision = model.vision
    assert vision is not None
    vision.place, vision._tower = where, None
    vision._kept.clear()
    model.engine.forget()


@pytest.fixture(scope="module", params=SETTINGS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[lowbit.Model, lowbit.Model]]:
    """A model in one process, and in two."""
    settings = SETTINGS[request.param]
    one = lowbit.load(FOLDER, **{**SIZES, **settings, "speculate": "off"})
    with closing(one), closing(shared(**settings)) as two:
        yield one, two
    assert two.crew is not None
    assert all(member.process.poll() is not None for member in two.crew.members)


def test_logits_are_near_those_of_one(pair: tuple[lowbit.Model, lowbit.Model]) -> None:
    _, two = pair
    assert two.vision is not None
    assert two.vision.place.device == DEVICE
    for prompt in prompts(two):
        a, b = (each.logits(prompt.ids, prompt.images) for each in pair)
        assert a.shape == b.shape
        apart = float((a - b).abs().max() / a.abs().max())
        print(f"{len(prompt.ids)} tokens: {apart:.4f} of the largest logit")
        assert apart < CLOSE
        assert torch.equal(two.logits(prompt.ids, prompt.images), b)


def test_runs_company_and_replays_change_no_bit(
    pair: tuple[lowbit.Model, lowbit.Model],
) -> None:
    _, two = pair
    given = prompts(two)
    expected = [alone(two, each) for each in given]
    for _ in range(3):  # chunks are launched, recorded, replayed
        assert [alone(two, each) for each in given] == expected
    for order in (range(len(given)), reversed(range(len(given)))):
        two.engine.forget()
        found = {n: submit(two, given[n]) for n in order}
        assert {n: said(handle) for n, handle in found.items()} == dict(enumerate(expected))


def test_what_is_reused_changes_no_bit(pair: tuple[lowbit.Model, lowbit.Model]) -> None:
    """A further turn on a picture reuses its keys and values; one on another picture none."""
    _, two = pair
    more = [min(two.stop_ids), *two.tokenizer.encode(" It says that.\n" * 3)]
    shown = [framed(pictures()[n], 256, 256) for n in (7, 8)]
    chats = [two.encode_prompt(asked(each), None) for each in shown]
    turns = [EncodedPrompt([*each.ids, *more], each.images) for each in chats]
    expected = [alone(two, each) for each in turns]
    two.engine.forget()
    for n, reused in ((0, False), (0, True), (1, False)):
        handle = submit(two, turns[n])
        assert said(handle) == expected[n]
        assert (handle.reused >= turns[n].images[0].stop) is reused


def test_words_are_read(pair: tuple[lowbit.Model, lowbit.Model]) -> None:
    """Eight together, and alone."""
    _, two = pair
    found = read(two, pictures())
    assert exact(found, words()) >= ENOUGH
    two.engine.forget()
    assert [read(two, [each])[0] for each in pictures()[::15]] == found[::15]


@pytest.mark.parametrize(
    "where", [VisionPlace("cuda", streamed=True), VisionPlace("cpu")], ids=["streamed", "cpu"]
)
def test_the_place_of_the_tower(
    pair: tuple[lowbit.Model, lowbit.Model], where: VisionPlace
) -> None:
    """One that is streamed gives the bits of a whole one; one on the CPU rounds otherwise."""
    _, two = pair
    assert two.vision is not None
    before, prompt = two.vision.place, prompts(two)[2]
    whole = two.logits(prompt.ids, prompt.images)
    try:
        place(two, where)
        found = two.logits(prompt.ids, prompt.images)
        assert two.vision.place is where
        apart = float((found - whole).norm() / whole.norm())
        print(f"{where}: {apart:.4f} apart")
        assert apart == 0.0 if where.streamed else 0.0 < apart < 0.1
        assert alone(two, prompt) == alone(two, prompt)
    finally:
        place(two, before)


@pytest.fixture(scope="module", params=SETTINGS)
def plain(request: pytest.FixtureRequest) -> tuple[str, list[Said]]:
    """Settings, and answers without drafts: together, then alone."""
    with closing(shared(**SETTINGS[request.param])) as model:
        return request.param, answers(model)[0]


def answers(model: lowbit.Model) -> tuple[list[Said], list[int]]:
    """Answers to prompts together, then alone, and the rounds of each."""
    given = prompts(model)
    model.engine.forget()
    handles = [submit(model, each) for each in given]
    found = [said(each) for each in handles]
    for each in given:
        model.engine.forget()
        handles.append(submit(model, each))
        found.append(said(handles[-1]))
    return found, [each.tally.rounds for each in handles]


@pytest.mark.parametrize("speculate", ["mtp", "ngram", "auto"])
def test_drafts_change_no_bit(plain: tuple[str, list[Said]], speculate: Mode) -> None:
    settings, expected = plain
    with closing(shared(speculate, **SETTINGS[settings])) as model:
        found, rounds = answers(model)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected], rounds
    assert found == expected  # log-probabilities, too
    assert speculate != "mtp" or all(rounds)


def test_gpus_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings pass through the host's memory then, with the same bits."""
    found = []
    for reaches in (True, False):
        monkeypatch.setattr(symmetric, "reach_each_other", lambda _, reaches=reaches: reaches)
        with closing(shared()) as model:
            assert model.crew is not None
            assert model.crew.through_host is not reaches
            found.append([alone(model, each) for each in prompts(model)])
    assert found[0] == found[1]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-an-answer"])
def test_a_process_that_is_killed_at_a_picture_ends_all(
    beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(shared()) as model:
        given, pieces, crew = prompts(model), VisionTower.pieces, model.crew
        assert crew is not None

        def killing(tower: VisionTower, image: ImagePatches) -> Iterator[torch.Tensor | None]:
            crew.members[0].process.kill()
            return pieces(tower, image)

        monkeypatch.setattr(VisionTower, "pieces", killing)
        handles = [submit(model, given[0])] if beside else []
        for handle in handles:
            next(handle)
        handles.append(submit(model, given[3]))
        for handle in handles:
            with pytest.raises(ResourceError, match=ENDED):
                handle.result()
        assert crew.problem is not None
