"""Prompts with images on a GPU: against transformers, in company, from the cache, speculated."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.engine.load_options import KVCache
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.state.step import StepPlan
from tests.runtime.conftest import PackedModel
from tests.runtime.hub_logits import error_ratio, in_bf16
from tests.runtime.image_prompts import END, Hub, Picture, Prompt, hub_of

pytestmark = pytest.mark.gpu

GREEDY = lowbit.SamplingParams(logprobs=2)
HOT = lowbit.SamplingParams(0.9, top_k=40, seed=5, logprobs=1)
CAT, DOG, STRIP, TALL = Picture(3, 5, 1), Picture(3, 5, 2), Picture(1, 9, 3), Picture(7, 2, 4)
LARGE = Picture(30, 40, 5)  # 1,200 tokens: it lies in two chunks
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
    "mtp_num_hidden_layers": 1,
    "max_position_embeddings": 4096,
}
Parts = Sequence[int | Picture | Sequence[int]]
PROMPTS: dict[str, Parts] = {
    "short": (3, Picture(2, 3), 4),  # of decode kernels
    "one": (5, CAT, 9),
    "four": (70, [END], CAT, 3, STRIP, 70, [END], TALL, 90, LARGE, 20),
    "text": (40,),
}
Load = Callable[..., lowbit.Model]


@pytest.fixture
def packed(make_qwen3_5: Callable[..., PackedModel]) -> PackedModel:
    return make_qwen3_5(lambda role: Scheme(8, 128), **SIZES)


@pytest.fixture
def hub(packed: PackedModel) -> Hub:
    return hub_of(packed)


@pytest.fixture
def load(packed: PackedModel) -> Load:
    def loaded(mode: str = "off", **options: Any) -> lowbit.Model:
        defaults: dict[str, Any] = {"context": 4096, "max_sequences": 8}
        return lowbit.load(
            packed.folder,
            device="cuda",
            speculate=mode,  # type: ignore[arg-type]
            **defaults | options,
        )

    return loaded


def moved(prompt: Prompt) -> Prompt:
    """Its embeddings on the GPU, in its type."""
    spans = [
        replace(span, embeddings=span.embeddings.bfloat16().cuda())
        for span in prompt.spans
        if isinstance(span.embeddings, Tensor)
    ]
    return replace(prompt, spans=tuple(spans))


def prompts(hub: Hub) -> list[Prompt]:
    return [moved(hub.prompt(*parts, seed=n)) for n, parts in enumerate(PROMPTS.values())]


def submit(model: lowbit.Model, prompt: Prompt, count: int = 40, **more: Any) -> Handle:
    fields: dict[str, Any] = {"sampling": GREEDY, "message_ends": frozenset({END})} | more
    images = prompt.spans
    return model.engine.submit(Request(prompt.ids, max_new_tokens=count, images=images, **fields))


def said(handle: Handle) -> tuple[object, ...]:
    """Tokens and the bits of their log-probabilities."""
    handle.result()
    return handle.output, list(handle.log_probabilities)


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_are_no_further_off_than_those_of_transformers(
    name: str, hub: Hub, load: Load
) -> None:
    prompt = hub.prompt(*PROMPTS[name])
    exact = hub.logits(prompt)
    rounded = Hub(in_bf16(hub.model)).logits(prompt)
    given = moved(prompt)
    ours = load().logits(given.ids, given.spans)
    assert error_ratio(ours, rounded, exact) < 1.25


@pytest.mark.parametrize("cache", ["bf16", "int8"])
def test_company_and_replays_change_no_bit(cache: KVCache, hub: Hub, load: Load) -> None:
    model, asked = load(kv_cache=cache), prompts(hub)

    def alone(prompt: Prompt) -> tuple[object, ...]:
        model.engine.forget()
        return said(submit(model, prompt))

    expected = [alone(prompt) for prompt in asked]
    for _ in range(3):  # chunks of text behind images are launched, recorded, replayed
        assert [alone(prompt) for prompt in asked] == expected
    for order in (range(len(asked)), reversed(range(len(asked)))):
        model.engine.forget()
        found = {n: submit(model, asked[n]) for n in order}
        assert {n: said(handle) for n, handle in found.items()} == dict(enumerate(expected))


def test_decoding_goes_on_as_its_prompt_would(hub: Hub, load: Load) -> None:
    """Decode steps and chunks rotate an answer by the same angles."""
    model = load()
    for prompt in prompts(hub):
        model.engine.forget()
        output = said(submit(model, prompt))[0]
        assert isinstance(output, tuple)
        ids = [*prompt.ids, *output]
        model.engine.forget()
        logits = model.engine.logits(ids, len(prompt.ids) - 1, prompt.spans).double()
        values = torch.log_softmax(logits[:-1, :261], dim=-1)
        handle = submit(model, prompt)
        handle.result()
        chosen = torch.tensor([each.chosen for each in handle.log_probabilities]).double()
        found = values.gather(1, torch.tensor(output, device="cuda")[:, None])[:, 0].cpu()
        assert (found - chosen).abs().max() < 0.1
        assert (found - chosen).abs().mean() < 0.02


def test_the_same_picture_is_reused_and_another_never(hub: Hub, load: Load) -> None:
    model, fresh = load(), load()

    def prompt(picture: Picture) -> Prompt:
        return moved(hub.prompt(70, [END], picture, 70, [END], 9))

    length = len(prompt(CAT).ids) - 9
    for picture, reused in ((CAT, 0), (CAT, length), (DOG, 71), (DOG, length), (CAT, length)):
        found = submit(model, prompt(picture))
        fresh.engine.forget()
        assert said(found) == said(submit(fresh, prompt(picture)))
        assert found.reused == reused


@pytest.mark.parametrize("mode", ["mtp", "ngram", "auto"])
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_speculation_changes_no_bit(
    mode: str, sampling: lowbit.SamplingParams, hub: Hub, load: Load
) -> None:
    plain, drafting = load(), load(mode)
    for prompt in prompts(hub):
        plain.engine.forget()
        drafting.engine.forget()
        expected = submit(plain, prompt, sampling=sampling)
        found = submit(drafting, prompt, sampling=sampling)
        assert said(found) == said(expected)
        ids = (*prompt.ids, *found.output, 7, 8)
        turn = replace(prompt, ids=ids)
        assert said(submit(drafting, turn)) == said(submit(plain, turn))
    drafting.engine.forget()
    plain.engine.forget()
    together = [submit(drafting, prompt, sampling=sampling) for prompt in prompts(hub)]
    for handle, prompt in zip(together, prompts(hub), strict=True):
        assert said(handle) == said(submit(plain, prompt, sampling=sampling))


def test_steps_of_text_add_nothing_to_positions(load: Load, hub: Hub) -> None:
    """The plans of text alone are those that there were without images."""
    model = load()
    said(submit(model, moved(hub.prompt(*PROMPTS["text"]))))
    runner = model.engine.runner
    keys: Any = runner.graphs._graphs
    assert not any(plan.shifted for name, plan, *_ in keys if name == "decode")
    plan = StepPlan(1, 1, 256, 1)
    assert runner.inputs.step.step(plan, runner.tables, runner.shifts).own_angles is None
    said(submit(model, moved(hub.prompt(*PROMPTS["one"]))))
    assert any(plan.shifted for name, plan, *_ in keys if name == "decode")


def test_the_host_waits_for_no_image(hub: Hub, load: Load) -> None:
    model, asked = load(), prompts(hub)

    def ask() -> list[tuple[object, ...]]:
        model.engine.forget()
        return [said(handle) for handle in [submit(model, prompt) for prompt in asked]]

    for _ in range(3):
        expected = ask()
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        assert ask() == expected
    finally:
        torch.cuda.set_sync_debug_mode(before)
