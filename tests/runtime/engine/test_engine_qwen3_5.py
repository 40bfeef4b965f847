"""Prefix reuse where layers have a state that cannot go back: never at the price of the answer."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.backends import delta_rule

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

GREEDY = lowbit.SamplingParams()
END = 250  # of a message; no other token has this id
IDS = torch.randint(250, (240,), generator=torch.Generator().manual_seed(4)).tolist()
FIRST, SECOND = [*IDS[:80], END], [*IDS[80:160], END]
PROMPT = [*FIRST, *SECOND, *IDS[160:170]]
Load = Callable[[], lowbit.Model]


@pytest.fixture
def load(make_qwen3_5: "Callable[..., PackedModel]") -> Load:
    folder = make_qwen3_5().folder
    return lambda: lowbit.load(folder, device="cpu", dtype=torch.float32, context=256)


def run(model: lowbit.Model, prompt: list[int]) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were reused."""
    request = lowbit.Request(tuple(prompt), GREEDY, 8, message_ends=frozenset({END}))
    handle = model.engine.submit(request)
    return list(handle), handle.reused


def test_a_prompt_that_goes_on_reuses_everything(load: Load) -> None:
    model = load()
    longer = [*PROMPT, *run(model, PROMPT)[0], 7, 8, 9]
    got, reused = run(model, longer)
    assert reused == len(longer) - 4  # the last token of the answer was not run
    assert got == run(load(), longer)[0]


def test_conversations_in_turn_go_on_from_where_each_was(
    make_qwen3_5: "Callable[..., PackedModel]", load: Load
) -> None:
    """Six messages each, of which every one leaves a snapshot, and only one runs at a time."""
    folder = make_qwen3_5(max_position_embeddings=1024).folder

    def talk(model: lowbit.Model, number: int) -> Iterator[tuple[list[int], int, int]]:
        """Answers, tokens that were reused, and tokens that had been run before."""
        prompt, run_before = list[int](), 0
        for turn in range(3):
            messages = [[(7 * number + turn) % 250, *IDS[i : i + 64], END] for i in (0, 70)]
            prompt = [*prompt, *messages[0], *messages[1], 3]
            answer, reused = run(model, prompt)
            yield answer, reused, run_before
            prompt = [*prompt, *answer]
            run_before = len(prompt) - 1  # the last token of the answer was not run

    def new_model() -> lowbit.Model:
        return lowbit.load(
            folder,
            device="cpu",
            dtype=torch.float32,
            context=1024,
            max_sequences=1,
            cache_tokens=4096,
        )

    model = new_model()
    talks = [talk(model, number) for number in range(3)]
    alone = [talk(new_model(), number) for number in range(3)]
    for _ in range(3):
        for together, fresh in zip(talks, alone, strict=True):
            answer, reused, run_before = next(together)
            assert reused == run_before
            assert answer == next(fresh)[0]


def test_a_prompt_that_turns_off_reuses_the_messages_before(load: Load) -> None:
    model = load()
    run(model, PROMPT)
    for _ in range(2):  # the second time the states are still there
        for other, expected in (
            ([*PROMPT[:-3], 99, 98], len(FIRST) + len(SECOND)),
            ([*FIRST, *SECOND[:-9], 97], len(FIRST)),
            ([*FIRST[:-1], 5, *SECOND], 0),
        ):
            got, reused = run(model, other)
            if other[:81] == FIRST:
                assert reused >= expected
            assert got == run(load(), other)[0]


def test_the_end_of_a_message_just_behind_a_chunk_is_reused(
    make_qwen3_5: "Callable[..., PackedModel]",
) -> None:
    """A picture of 1,024 tokens and a few words end so."""
    folder = make_qwen3_5(max_position_embeddings=2048).folder
    model = lowbit.load(folder, device="cpu", dtype=torch.float32, context=2048)
    chunk = model.engine.runner.capacity.chunk
    message = [id % 250 for id in range(chunk + 20)] + [END]
    run(model, [*message, 5, 6, 7])
    assert run(model, [*message, 8, 9])[1] == len(message)


def test_a_prompt_that_turns_off_earlier_starts_over(load: Load) -> None:
    model = load()
    run(model, PROMPT)
    other = [*PROMPT[:79], 99, 98, *PROMPT]
    got, reused = run(model, other)
    assert reused == 0
    assert got == run(load(), other)[0]


def test_a_state_of_other_tokens_is_never_taken_for_these(load: Load) -> None:
    model = load()
    run(model, PROMPT)
    model.logits(PROMPT[::-1])  # as long, other tokens
    other = [*PROMPT[::-1][:95], 5]
    assert run(model, other)[0] == run(load(), other)[0]
    model.engine.forget()
    got, reused = run(model, PROMPT)
    assert reused == 0
    assert got == run(load(), PROMPT)[0]


# Three layers: in the first message, at its end, in the last chunk of the prompt, in decoding.
@pytest.mark.parametrize("calls", [2, 3, 8, 11, 14])
def test_a_pass_interrupted_between_layers_is_forgotten(
    load: Load, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    model = load()
    left = [calls]
    gated_norm = delta_rule.gated_norm

    def interrupted(*arguments: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return gated_norm(*arguments)

    monkeypatch.setattr(delta_rule, "gated_norm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, PROMPT)
    monkeypatch.undo()
    got, reused = run(model, PROMPT)
    assert reused == 0
    assert got == run(load(), PROMPT)[0]


def test_repeating_a_prompt_gives_the_same_tokens(load: Load) -> None:
    model = load()
    first, _ = run(model, PROMPT)
    again, reused = run(model, PROMPT)
    assert again == first
    assert reused == len(FIRST) + len(SECOND)
