"""Conversations whose turns share one cache, against a model that has forgotten all before."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lowbit.runtime as lowbit
from tests.lanes import in_commands
from tests.short_models import Shorten

GREEDY = lowbit.SamplingParams()
# Long enough that a prompt is cut behind each, and the next one goes on from there.
LONG = (
    " Tell it to children, with a dog and a girl, of a day in the garden, in easy words, and so "
    "that its end makes everybody happy. Leave out the night, the dark, the sea, bad people, and "
    "all that hurts; and when you are done, tell us who you are."
)
QUESTIONS = tuple(q + LONG for q in ("Tell me a story about a dog.", "Go on.", "And then?", "Why?"))
# An answer is kept without its reasoning, as by the templates of reasoning models.
REASONING = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is false %}{{- '\\n</think>\\n\\n' }}{% endif %}
"""

Load = Callable[[], lowbit.Model]


@pytest.fixture(params=["tiny-qwen3", "tiny-qwen3.5"])
def load(request: pytest.FixtureRequest, tmp_path: Path, shorten: Shorten) -> Load:
    """A trained model, dense or hybrid, with a template that thinks."""
    folder = tmp_path / request.param
    shutil.copytree(shorten(request.param), folder)
    (folder / "chat_template.jinja").write_text(REASONING)
    return lambda: lowbit.load(folder, device="cpu", dtype=torch.float32, context=1024)


@in_commands("tiny-qwen3-False-8")
@pytest.mark.parametrize(
    ("load", "thinking", "tokens"),
    [("tiny-qwen3", False, 8), ("tiny-qwen3.5", True, 6)],
    indirect=["load"],
)
def test_every_turn_is_what_a_fresh_model_answers(load: Load, thinking: bool, tokens: int) -> None:
    model, fresh, messages = load(), load(), list[lowbit.Message]()
    reused = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        made, expected = (
            held.generate(messages, sampling=GREEDY, thinking=thinking, max_new_tokens=tokens)
            for held in (model, fresh)
        )
        assert made.prompt_token_ids == expected.prompt_token_ids
        assert made.token_ids == expected.token_ids
        assert expected.timings.reused_tokens == 0
        fresh.engine.forget()
        reused.append(made.timings.reused_tokens)
        messages.append({"role": "assistant", "content": made.text})
    assert reused[0] == 0
    # A later prompt holds all turns before the last question: none is run again.
    assert reused == sorted(set(reused))


@in_commands("tiny-qwen3-True")
@pytest.mark.parametrize(
    ("load", "thinking"), [("tiny-qwen3", True), ("tiny-qwen3.5", False)], indirect=["load"]
)
def test_a_turn_taken_back_or_repeated_or_redrawn_changes_nothing(
    load: Load, thinking: bool
) -> None:
    hot = lowbit.SamplingParams(temperature=0.9, top_k=30, seed=5)
    model, fresh = load(), load()
    first, other, short = (
        lowbit.Message(role="user", content=text)
        for text in (QUESTIONS[0], QUESTIONS[0] + " Please.", "Hm")
    )
    left = model.stream([first], sampling=GREEDY, thinking=thinking)
    next(left.pieces)
    left.close()
    for messages in ([first], [first], [other], [first, short], [first]):
        for sampling in (GREEDY, hot):
            made, expected = (
                held.generate(messages, sampling=sampling, thinking=thinking, max_new_tokens=4)
                for held in (model, fresh)
            )
            assert made.token_ids == expected.token_ids
            assert expected.timings.reused_tokens == 0
            fresh.engine.forget()
