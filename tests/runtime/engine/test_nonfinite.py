"""NaN and infinities: refused in weights at load, and in logits where a request meets them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.errors import CheckpointError, FormatError
from lowbit.formats.layout.packing import SCALE
from lowbit.runtime.cli.main import main
from lowbit.runtime.evaluate.scoring import score
from tests.lanes import in_commands
from tests.runtime.conftest import PackedModel
from tests.runtime.dense_embedding import dense_embedding

Make = Callable[..., PackedModel]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
PARAMS = {
    "greedy": lowbit.SamplingParams(),
    "few candidates": lowbit.SamplingParams(temperature=1.0, top_k=20, seed=1),
    "all candidates": lowbit.SamplingParams(temperature=1.0, seed=1),
    "penalties": lowbit.SamplingParams(presence_penalty=0.5, repetition_penalty=1.2),
}
POISON = 200  # an id that no other prompt holds
GOOD = [1, 2, 3, 4, 5]
ANY_NUMBER = [float("nan"), -float("nan"), float("inf"), float("-inf")]


@pytest.fixture(params=["dense", "hybrid"])
def make(request: pytest.FixtureRequest, make_model: Make, make_qwen3_5: Make) -> Make:
    return make_model if request.param == "dense" else make_qwen3_5


def poisoned(make: Make, value: float = float("nan")) -> lowbit.Model:
    """A model in which one token's embedding is not a number; loading would have refused it."""
    model = lowbit.load(make(**SIZES).folder, device=DEVICE)
    dense_embedding(model.engine.decoder)[POISON] = value
    return model


def texts(model: lowbit.Model, ids: list[int], params: lowbit.SamplingParams) -> list[int]:
    return list(model.engine.generate(ids, params, 6))


def test_a_request_ends_with_an_error_and_the_next_is_as_if_alone(make: Make) -> None:
    model = poisoned(make)
    for params, place in zip(PARAMS.values(), (0, 3, 5, 3), strict=True):
        expected = texts(model, GOOD, params)
        prompt = [*GOOD[:place], POISON, *GOOD[place:]]
        with pytest.raises(CheckpointError, match="after 6 tokens are NaN or infinite") as caught:
            texts(model, prompt, params)
        assert caught.value.hint is not None
        assert "lowbit-convert verify" in caught.value.hint
        assert texts(model, GOOD, params) == expected


@pytest.mark.parametrize("value", ANY_NUMBER)
def test_a_step_that_goes_wrong_ends_the_request_there(make: Make, value: float) -> None:
    """Tokens before it have been given out; the token whose logits are wrong has not."""
    model = poisoned(make, value)
    given: list[int] = []

    def generate() -> None:
        for id in model.engine.generate(GOOD, PARAMS["greedy"], 20):
            given.append(id)
            if len(given) == 3:
                model.engine.runner.inputs.chosen.fill_(POISON)  # as if it had been chosen

    with pytest.raises(CheckpointError, match="NaN or infinite"):
        generate()
    assert 3 <= len(given) <= 4  # a step may have been under way


def test_one_of_several_fails_and_the_others_do_not(make: Make) -> None:
    model = poisoned(make)
    alone = [texts(model, ids, PARAMS["greedy"]) for ids in (GOOD, GOOD[:2])]
    for bad in ([POISON], [*GOOD, POISON]):
        prompts = (GOOD, bad, GOOD[:2])
        first, failing, last = (model.engine.generate(p, PARAMS["greedy"], 6) for p in prompts)
        assert [list(first), list(last)] == alone
        with pytest.raises(CheckpointError, match="NaN or infinite"):
            next(failing)
        with pytest.raises(CheckpointError, match="NaN or infinite"):
            score(model, bad, [7, 8])
    assert texts(model, GOOD, PARAMS["greedy"]) == alone[0]


@in_commands("hybrid-inf", "hybrid--inf", "dense-nan*", "dense--inf")
@pytest.mark.parametrize("value", ANY_NUMBER)
def test_weights_that_are_not_numbers_are_refused_by_name(make: Make, value: float) -> None:
    packed = make()
    names: list[str] = []
    packed.rewrite(lambda tensors: names.extend(tensors))
    dense = [name for name in names if not name.endswith(("_packed", "_shape"))]
    assert len(dense) > 10
    for name in dense[:: 2 if value is ANY_NUMBER[0] else 11]:

        def spoil(tensors: dict[str, Tensor], name: str = name) -> None:
            tensors[name] = tensors[name].clone()
            tensors[name].view(-1)[-1] = value

        before: dict[str, Tensor] = {}
        packed.rewrite(lambda tensors, before=before: before.update(tensors))  # type: ignore[misc]
        packed.rewrite(spoil)
        with pytest.raises(FormatError, match="holds NaN or Inf") as caught:
            lowbit.load(packed.folder, device=DEVICE)
        assert name in str(caught.value)
        packed.rewrite(lambda tensors, before=before: tensors.update(before))  # type: ignore[misc]
    lowbit.load(packed.folder, device=DEVICE)


@pytest.mark.parametrize("as_json", [False, True])
def test_scales_that_overflow_end_the_command_with_an_error(make: Make, as_json: bool) -> None:
    packed = make()

    def enlarge(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith(SCALE):
                tensors[name] = torch.full_like(tensors[name], 3e38)

    packed.rewrite(enlarge)
    arguments = [str(packed.folder), "Hi", "--raw", "--temperature", "0", "--max-new-tokens", "4"]
    result = CliRunner().invoke(main, [*arguments, *(["--json"] if as_json else [])])
    assert result.exit_code == 1
    assert result.stdout.strip() == ""
    assert "NaN or infinite" in result.stderr
    assert "Traceback" not in result.stderr
