"""Prefix reuse where layers have a state that cannot go back: never at the price of the answer."""

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.backends import delta_rule

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

GREEDY = lowbit.SamplingParams()
PROMPT = torch.randint(256, (40,), generator=torch.Generator().manual_seed(4)).tolist()
Load = Callable[[], lowbit.Model]


@pytest.fixture
def load(make_qwen3_5: "Callable[..., PackedModel]") -> Load:
    folder = make_qwen3_5().folder
    return lambda: lowbit.load(folder, device="cpu", dtype=torch.float32, context=128)


def run(model: lowbit.Model, prompt: list[int], kept: int | None = None) -> list[int]:
    return list(model.engine.generate(prompt, GREEDY, 12, kept))


def test_a_prompt_that_goes_on_reuses_everything(load: Load) -> None:
    model = load()
    longer = [*PROMPT, *run(model, PROMPT), 7, 8, 9]
    got = run(model, longer)
    assert model.engine.reused == len(longer) - 4  # the last token of the answer was not run
    assert got == run(load(), longer)


def test_a_prompt_that_turns_off_after_the_kept_part_reuses_that(load: Load) -> None:
    model = load()
    run(model, PROMPT, kept=30)
    for _ in range(2):  # the second time the state of 30 tokens is still there
        other = [*PROMPT[:33], 99, 98]
        got = run(model, other, kept=30)
        assert model.engine.reused == 30
        assert got == run(load(), other)
        assert run(model, [*PROMPT[:33], 97], kept=30) == run(load(), [*PROMPT[:33], 97])
        assert model.engine.reused == 30
        run(model, PROMPT, kept=30)


def test_a_prompt_that_turns_off_earlier_starts_over(load: Load) -> None:
    model = load()
    run(model, PROMPT, kept=30)
    other = [*PROMPT[:29], 99, 98, *PROMPT]
    got = run(model, other)
    assert model.engine.reused == 0
    assert got == run(load(), other)


def test_by_default_all_but_the_last_token_is_kept(load: Load) -> None:
    model = load()
    run(model, PROMPT)
    other = [*PROMPT[:-1], 99]
    assert run(model, other) == run(load(), other)
    run(model, PROMPT)
    run(model, [*PROMPT, 200, 201])
    assert model.engine.reused == len(PROMPT) - 1


def test_a_state_of_other_tokens_is_never_taken_for_these(load: Load) -> None:
    model = load()
    run(model, PROMPT, kept=10)
    model.logits(PROMPT[::-1])  # as long, other tokens; nothing of the above is left
    other = [*PROMPT[::-1][:15], 5]
    assert run(model, other) == run(load(), other)
    model.engine.forget()
    assert run(model, PROMPT) == run(load(), PROMPT)


def test_logits_after_generating_start_over(load: Load) -> None:
    model = load()
    fresh = model.logits(PROMPT)
    run(model, [5, 6, 7])
    assert torch.equal(model.logits(PROMPT), fresh)


def test_an_abandoned_request_leaves_the_engine_usable(load: Load) -> None:
    model = load()
    request = model.engine.generate(PROMPT, GREEDY, 10)
    begun = list(islice(request, 3))
    del request
    longer = [*PROMPT, *begun, 1]
    assert run(model, longer) == run(load(), longer)


@pytest.mark.parametrize("calls", [2, 5, 8, 11])  # three layers: in prefill, at its end, in decode
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
        run(model, PROMPT, kept=30)
    monkeypatch.undo()
    assert run(model, PROMPT) == run(load(), PROMPT)
    assert model.engine.reused == 0


def test_repeating_a_prompt_gives_the_same_bytes(load: Load) -> None:
    model = load()
    assert run(model, PROMPT, kept=30) == run(model, PROMPT, kept=30)
