"""Prompts with images through the engine, against transformers with its vision tower."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.runtime.engine import engine
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.state.step import StepPlan
from tests.lanes import in_commands
from tests.runtime.conftest import PackedModel
from tests.runtime.engine.graph_stand_in import run_through_graphs
from tests.runtime.hub_logits import distance, error_ratio, in_bf16
from tests.runtime.image_prompts import END, IMAGE, Hub, Picture, Prompt, hub_of
from tests.runtime.models.test_qwen3_5 import LARGE_HEADS, MODELS

GREEDY = lowbit.SamplingParams(logprobs=2)
HOT = lowbit.SamplingParams(0.9, top_k=40, seed=5, logprobs=1)
CAT, DOG, STRIP, DOT = Picture(3, 5, 1), Picture(3, 5, 2), Picture(1, 9, 3), Picture(1, 1, 4)
TALL, LARGE = Picture(7, 2, 5), Picture(9, 8, 6)
PROMPTS: dict[str, tuple[int | Picture, ...]] = {
    "one": (5, CAT, 9),
    "first-and-last": (CAT, 1, TALL),
    "four": (20, CAT, 3, STRIP, 1, DOT, 40, LARGE, 2),
}

Make = Callable[..., PackedModel]
SetChunk = Callable[[int], None]


def asked(prompt: Prompt, count: int = 12, **more: Any) -> Request:
    fields: dict[str, Any] = {"sampling": GREEDY, "message_ends": frozenset({END})} | more
    return Request(prompt.ids, max_new_tokens=count, images=prompt.spans, **fields)


def submitted(model: lowbit.Model, prompt: Prompt, count: int = 12, **more: Any) -> Handle:
    """The request behind its last token."""
    handle = model.engine.submit(asked(prompt, count, **more))
    handle.result()
    return handle


def said(handle: Handle) -> tuple[object, ...]:
    """Tokens and the bits of their log-probabilities."""
    return handle.output, list(handle.log_probabilities)


@in_commands("27B-heads", "small")
@pytest.mark.parametrize(
    ("name", "prompts", "chunks"),
    [
        ("small", ("one", "first-and-last"), (512, 7)),
        ("small", ("four",), (512, 64, 37, 7)),
        ("27B-heads", ("four",), (64, 37)),
        ("irregular", ("four",), (64, 37)),
    ],
    ids=["small", "small-four", "27B-heads", "irregular"],
)
def test_fp32_logits_match_transformers_whatever_the_chunks(
    name: str,
    prompts: Iterable[str],
    chunks: tuple[int, ...],
    make_qwen3_5: Make,
    set_chunk: SetChunk,
) -> None:
    packed = make_qwen3_5(**MODELS[name])
    hub = hub_of(packed)
    model = lowbit.load(packed.folder, device="cpu", dtype=torch.float32)
    for each in prompts:
        prompt = hub.prompt(*PROMPTS[each])
        expected = hub.logits(prompt)
        for chunk in chunks:
            set_chunk(chunk)
            assert distance(model.logits(prompt.ids, prompt.spans), expected) < 1e-4
            model.engine.forget()


def test_experts_and_yarn_take_images(make_experts: Make) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    rope = LARGE_HEADS["rope_parameters"] | {"mrope_section": [3, 3, 2]} | yarn
    packed = make_experts(True, rope_parameters=rope)
    hub = hub_of(packed)
    prompt = hub.prompt(*PROMPTS["four"])
    model = lowbit.load(packed.folder, device="cpu", dtype=torch.float32)
    assert distance(model.logits(prompt.ids, prompt.spans), hub.logits(prompt)) < 1e-4


def test_bf16_is_no_further_off_than_transformers_in_bf16(
    hub: Hub, fresh: Callable[..., lowbit.Model]
) -> None:
    prompt = hub.prompt(*PROMPTS["four"])
    exact = hub.logits(prompt)
    ours = fresh(dtype=torch.bfloat16).logits(prompt.ids, prompt.spans)
    rounded = Hub(in_bf16(hub.model)).logits(prompt)
    assert error_ratio(ours, rounded, exact) < 1.05  # 0.81; 0.83 with products in BF16


@in_commands("one")
@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_match_transformers(
    name: str, hub: Hub, fresh: Callable[..., lowbit.Model], set_chunk: SetChunk
) -> None:
    prompt, model = hub.prompt(*PROMPTS[name]), fresh()
    expected = hub.greedy(prompt, 12)
    for chunk in (512, 13):
        set_chunk(chunk)
        model.engine.scheduler.restart()
        assert list(submitted(model, prompt, 12).output) == expected


@in_commands("cpu")
@pytest.mark.parametrize("graphs", [False, True], ids=["cpu", "graphs"])
def test_company_changes_no_bit(
    graphs: bool,
    hub: Hub,
    fresh: Callable[..., lowbit.Model],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Image beside image and beside text, in steps that all of them share."""
    prompts = [hub.prompt(*parts, seed=n) for n, parts in enumerate(PROMPTS.values())]
    prompts += [hub.prompt(30, seed=9)]
    alone = [said(submitted(fresh(), each, 12 + n)) for n, each in enumerate(prompts)]
    model = fresh()
    if graphs:
        run_through_graphs(model, monkeypatch)
    for turn in range(2):  # rows and shifts are others in the second
        model.engine.forget()
        order = range(len(prompts)) if not turn else reversed(range(len(prompts)))
        found = {n: model.engine.submit(asked(prompts[n], 12 + n)) for n in order}
        assert [next(handle) for handle in found.values()]
        for n, handle in found.items():
            handle.result()
            assert said(handle) == alone[n]


@in_commands("7", "16")
@pytest.mark.parametrize("tail", [1, 7, 16])
def test_the_last_words_behind_a_picture_are_padded(
    tail: int, hub: Hub, fresh: Callable[..., lowbit.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [hub.prompt(70, [END], CAT, tail, seed=seed) for seed in range(3)]
    expected = [said(submitted(fresh(), prompt)) for prompt in prompts]
    model = fresh()
    run_through_graphs(model, monkeypatch)
    for prompt, one in zip(prompts, expected, strict=True):  # launched, recorded, replayed
        model.engine.forget()
        assert said(submitted(model, prompt)) == one


@in_commands("13")
@pytest.mark.parametrize("size", [5, 13])
def test_pictures_in_short_chunks_are_padded(
    size: int,
    hub: Hub,
    fresh: Callable[..., lowbit.Model],
    set_chunk: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [hub.prompt(20, [END], CAT, 30, TALL, 9, seed=seed) for seed in range(2)]
    set_chunk(size)
    expected = [said(submitted(fresh(), prompt)) for prompt in prompts]
    model = fresh()
    run_through_graphs(model, monkeypatch)
    for prompt, one in zip(prompts, expected, strict=True):
        model.engine.forget()
        assert said(submitted(model, prompt)) == one
    kinds: Any = model.engine.runner.chunks.graphs._graphs  # type: ignore[union-attr]
    assert any(images for _, images in kinds)


def test_images_and_text_behind_them_take_padded_chunks_too(
    hub: Hub, fresh: Callable[..., lowbit.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = hub.prompt(70, [END], CAT, 70, [END], 40, TALL, 100, [END], 20)
    expected = said(submitted(fresh(), prompt))
    model = fresh()
    run_through_graphs(model, monkeypatch)
    chunks_run: list[tuple[int, bool, bool]] = []
    chunks: Any = model.engine.runner.chunks
    run = type(chunks).run

    def noted(self: Any, plan: StepPlan, *args: Any) -> Any:
        chunks_run.append((plan.tokens, plan.axes is not None, plan.shifted))
        return run(self, plan, *args)

    monkeypatch.setattr(type(chunks), "run", noted)
    for _ in range(3):  # launched, recorded, replayed
        model.engine.forget()
        assert said(submitted(model, prompt)) == expected
    kinds = [(71, False, False), (86, True, False), (155, True, False), (20, False, True)]
    assert chunks_run == kinds * 3
    graphs = [(plan.tokens, plan.shifted, images) for plan, images in chunks.graphs._graphs]
    text, pictures = (
        [(32, True, False), (128, False, False)],
        [(128, False, True), (192, False, True)],
    )
    assert sorted(graphs) == sorted(text + pictures)


def test_text_alone_has_angles_by_position(fresh: Callable[..., lowbit.Model], hub: Hub) -> None:
    """No step of text alone adds anything, also in rows that images have had."""
    model = fresh()
    submitted(model, hub.prompt(*PROMPTS["one"]))
    steps: list[Any] = []
    decoder, each_layer = model.engine.decoder, type(model.engine.decoder).each_layer

    def noted(self: Any, ids: Any, state: Any, step: Any) -> Iterator[Any]:
        steps.append(step)
        return each_layer(self, ids, state, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(decoder), "each_layer", noted)
        submitted(model, hub.prompt(40))
        assert len(steps) > 10
        assert all(step.own_angles is step.axes is None and not step.embedded for step in steps)
        submitted(model, hub.prompt(*PROMPTS["one"]))
        assert steps[-1].own_angles is not None


def test_the_same_picture_is_reused_and_another_never(
    hub: Hub, fresh: Callable[..., lowbit.Model]
) -> None:
    def prompt(picture: Picture, before: int = 70) -> Prompt:
        return hub.prompt(before, [END], picture, 70, [END], 9)

    model, length = fresh(), len(prompt(CAT).ids) - 9
    for picture, before, reused in (
        (CAT, 70, 0),
        (CAT, 70, length),
        (DOG, 70, 71),  # of its ids all are those of the cat
        (DOG, 70, length),
        (CAT, 70, length),
        (CAT, 69, 0),
        (Picture(5, 3, 1), 70, 71),
    ):
        given = prompt(picture, before)
        found = submitted(model, given)
        assert found.reused == reused
        assert said(found) == said(submitted(fresh(), given))
    assert submitted(model, replace(prompt(CAT), spans=())).reused == 71
    span = prompt(CAT).spans[0]
    turned = replace(prompt(CAT), spans=(replace(span, rows=5, columns=3),))
    assert submitted(model, turned).reused == 71


def test_chats_with_images_grow(hub: Hub, fresh: Callable[..., lowbit.Model]) -> None:
    """Every turn begins behind all that was said, with the delta of the images before."""
    model, turns = fresh(), [hub.prompt(6, CAT, 5)]
    for number, picture in enumerate((TALL, None, STRIP)):
        last = turns[-1]
        found = submitted(model, last, 9)
        assert found.reused == (0 if not number else len(turns[-2].ids) + 8)
        assert found.output == submitted(fresh(), last, 9).output
        ids = [*last.ids, *found.output, 7, 8]
        more = [] if picture is None else [hub.span(picture, len(ids))]
        ids += [IMAGE] * sum(span.count for span in more) + [5] * 4
        turns.append(Prompt(tuple(ids), (*last.spans, *more), ()))


def test_logits_reuse_images_of_the_cache(hub: Hub, fresh: Callable[..., lowbit.Model]) -> None:
    model, prompt = fresh(), hub.prompt(70, [END], CAT, 20)
    submitted(model, prompt, 3)
    found = model.engine.logits(prompt.ids, len(prompt.ids) - 2, prompt.spans)
    assert distance(found, hub.logits(prompt)[-2:]) < 1e-4


def test_models_of_text_take_no_images(make_model: Make, hub: Hub) -> None:
    model = lowbit.load(make_model().folder, device="cpu", dtype=torch.float32)
    prompt = hub.prompt(*PROMPTS["one"])
    with pytest.raises(RequestError, match="the model takes no images"):
        submitted(model, prompt)
    with pytest.raises(RequestError, match="the model takes no images"):
        model.logits(prompt.ids, prompt.spans)


def test_the_library_streams_after_ids_with_images(
    hub: Hub, fresh: Callable[..., lowbit.Model]
) -> None:
    prompt, model = hub.prompt(*PROMPTS["one"]), fresh()
    stream = model.stream_ids(
        prompt.ids,
        images=prompt.spans,
        max_new_tokens=9,
        raw=True,
    )
    "".join(stream)
    tokens = list(stream.generation.token_ids)
    assert tokens == hub.greedy(prompt, 9)[: len(tokens)]


def test_images_come_right_after_a_step_that_failed(
    hub: Hub, fresh: Callable[..., lowbit.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of what was added to positions in their rows is taken for granted any more."""
    model, prompt, text = fresh(), hub.prompt(*PROMPTS["four"]), hub.prompt(20)
    expected = [said(submitted(fresh(), each)) for each in (text, prompt)]
    handle = model.engine.submit(asked(prompt))
    next(handle)
    with monkeypatch.context() as patch:
        patch.setattr(type(model.engine.runner), "run_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            handle.result()
    handles = [model.engine.submit(asked(each)) for each in (text, prompt)]
    for handle in handles:
        handle.result()
    assert [said(handle) for handle in handles] == expected


def test_a_prompt_with_images_may_pause_beside_an_answer(
    hub: Hub, fresh: Callable[..., lowbit.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of its layers others decode, whose angles are their own."""
    monkeypatch.setattr(engine, "CPU_TURN_S", -1.0)
    prompts = [hub.prompt(*PROMPTS["one"]), hub.prompt(*PROMPTS["four"], seed=1)]
    alone = [said(submitted(fresh(), each, 20)) for each in prompts]
    model = fresh()
    first = model.engine.submit(asked(prompts[0], 20))
    next(first)
    second = model.engine.submit(asked(prompts[1], 20))
    next(second)
    for handle, expected in zip((first, second), alone, strict=True):
        handle.result()
        assert said(handle) == expected
