"""Answers of a model: those of transformers, whatever their batch; ends, thinking and memory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.convert.original.weights import open_weights
from lowbit.convert.plan import memory
from lowbit.convert.texts import own_text
from lowbit.convert.texts.own_text import (
    RenderedPrompts,
    answer,
    build_model,
    load_weights,
    render_prompts,
    size_bytes,
)
from lowbit.formats.architectures import read_config
from lowbit.formats.errors import CheckpointError, RequestError, ResourceError
from lowbit.formats.text.template import ChatTemplate, load_chat_template
from lowbit.formats.text.tokenizer import load_text_tokenizer
from tests.lanes import in_commands

CPU = torch.device("cpu")
SAID = ("Once", "Tell me a story about a dog and a cat", "The big red ball", "Why?")
TOY = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if enable_thinking %}<t>{% endif %}"
PLAIN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def whole(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    weights = open_weights(folder)
    model = build_model(weights, dtype)
    load_weights(model, weights, CPU)
    return model


def asked_of(folder: Path, tokens: int, template: str = PLAIN) -> RenderedPrompts:
    config = read_config(json.loads((folder / "config.json").read_text()))
    return render_prompts(
        SAID, ChatTemplate(template, {}), load_text_tokenizer(folder), config, tokens
    )


def texts(folder: Path, model: Any, asked: RenderedPrompts, batch: int, seed: int = 0) -> list[str]:
    tokenizer = load_text_tokenizer(folder)
    found = answer(model, asked, tokenizer, (4091, 4093), batch, seed, lambda *_: None)
    return [one.text for one in found]


@in_commands("tiny-qwen3")
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_answers_are_those_of_transformers_in_any_batch(
    name: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, so that nothing is drawn: padding and batches change no token."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    def greedy(tokens: int, ends: Any) -> Any:
        return GenerationConfig(
            do_sample=False, max_new_tokens=tokens, eos_token_id=list(ends), pad_token_id=ends[0]
        )

    monkeypatch.setattr(own_text, "_sampling", greedy)
    folder = tiny.with_name(name)
    model, asked = whole(folder), asked_of(folder, 8)
    found = texts(folder, model, asked, batch=4)
    assert found == texts(folder, model, asked, batch=1)
    assert found == texts(folder, model, asked, batch=3)

    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert size_bytes(model) == sum(p.numel() * 4 for p in original.parameters())
    original.generation_config = greedy(8, (4091, 4093))
    tokenizer = load_text_tokenizer(folder)
    for text, prompt, ids in zip(found, asked.texts, asked.ids, strict=True):
        given = torch.tensor([ids])
        out = original.generate(given, attention_mask=torch.ones_like(given))[0, len(ids) :]
        assert text == prompt + tokenizer.decode(out.tolist())


def test_a_seed_gives_the_same_answers_and_leaves_the_generator_alone(tiny: Path) -> None:
    model, asked = whole(tiny), asked_of(tiny, 8)
    before = torch.get_rng_state()
    first = texts(tiny, model, asked, batch=4)
    assert texts(tiny, model, asked, batch=4) == first
    assert texts(tiny, model, asked, batch=4, seed=1) != first
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_sharpens_the_distribution(tiny: Path) -> None:
    """The model's generation_config asks for top_k 20 and temperature 0.6."""
    from transformers import GenerationMixin

    model = whole(tiny)
    model.generation_config = own_text._sampling(4, (4091,))
    seen: list[Any] = []
    sample = GenerationMixin._sample

    def spied(self: Any, *given: Any, **named: Any) -> Any:
        seen.extend(named["logits_processor"])
        return sample(self, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "_sample", spied)
        own_text._generate(model, [[1, 2, 3], [4]], own_text._Steps(0, 8, 2, lambda *_: None))
    assert seen == []


def test_an_end_token_ends_an_answer(tiny: Path) -> None:
    """An end token that comes at once, one that never comes, and a cut character."""
    tokenizer = load_text_tokenizer(tiny)
    end = tokenizer.encode("<|im_end|>")
    words = tokenizer.encode("Hello there")
    ended = own_text._as_answer("Q", [*words, *end, *end, *words], tokenizer, end)
    assert ended == own_text.Answer("QHello there<|im_end|>", len(words) + 1, True)
    cut = own_text._as_answer("Q", words, tokenizer, end)
    assert cut == own_text.Answer("QHello there", len(words), False)
    accent = tokenizer.encode("é")
    if len(accent) > 1:
        assert own_text._as_answer("Q", accent[:1], tokenizer, end).text == "Q"


def test_steps_are_reported_and_an_early_end_fills_the_bar(tiny: Path) -> None:
    model, asked = whole(tiny), asked_of(tiny, 3)
    tokenizer = load_text_tokenizer(tiny)
    seen: list[tuple[int, int]] = []
    every = tuple(range(4096))  # each token ends an answer
    found = answer(model, asked, tokenizer, every, 2, 0, lambda _, *step: seen.append(step))
    assert [(one.tokens, one.ended) for one in found] == [(1, True)] * 4
    assert seen == [(2, 12), (6, 12), (8, 12), (12, 12)]


def test_thinking_is_on_in_every_second_prompt_where_it_can_be_switched(tiny: Path) -> None:
    expected = tuple(f"[{said}]" for said in SAID)
    on = tuple(text + "<t>" * (number % 2 == 0) for number, text in enumerate(expected))
    assert asked_of(tiny, 4, TOY).texts == on
    assert asked_of(tiny, 4, PLAIN).texts == expected
    unused = PLAIN + "{# enable_thinking #}"  # named, but both ways read the same
    assert asked_of(tiny, 4, unused).texts == expected
    template = load_chat_template(tiny)
    assert template is not None
    rendered = asked_of(tiny, 4, template.source).texts
    assert [text.endswith("</think>\n\n") for text in rendered] == [False, True, False, True]


def test_answers_beyond_the_context_are_refused(tiny: Path) -> None:
    asked = asked_of(tiny, 4)
    room = 2048 - asked.longest
    assert asked_of(tiny, room).tokens == room
    with pytest.raises(RequestError, match="exceed the model's context of 2048") as caught:
        asked_of(tiny, room + 1)
    assert caught.value.hint == f"--tokens {room} fits"


def test_the_batch_is_what_fits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(json.loads((tiny / "config.json").read_text()))
    asked, weights = asked_of(tiny, 400), 10**9
    each = memory.answer_bytes(config, asked.longest, asked.tokens, 2)
    assert each > 2 * 6 * 2 * 64 * 2 * (asked.longest + 400)  # the cache alone

    def batch(free: int | None, device: str = "cpu") -> int:
        monkeypatch.setattr(memory, "free_bytes", lambda _: free)
        return memory.answers_that_fit(each, weights, own_text.BATCH[device], device)

    assert [batch(weights + n * each) for n in (1, 2, 3, 5, 9, 1000)] == [1, 2, 2, 4, 8, 16]
    assert batch(None) == 16
    assert batch(weights + 1000 * each, "cuda") == 256
    for device, words in (("cpu", "layer by layer"), ("cuda", "--device cpu")):
        with pytest.raises(
            ResourceError, match=r"takes up to 1\.0 GB of memory, free on"
        ) as caught:
            batch(weights + each - 1, device)
        assert words in str(caught.value.hint)


def test_shapes_are_compared_before_anything_is_read(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 512}))
    with pytest.raises(CheckpointError, match=r"has shape \[768, 256\], expected \[512, 256\]"):
        build_model(open_weights(folder), torch.bfloat16)


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_without_fast_bf16_answers_in_fp32(
    fast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_text, "multiplies_bf16", lambda: fast)
    assert own_text.dtype_on(CPU) == dtype
    assert own_text.dtype_on(torch.device("cuda")) == torch.bfloat16
