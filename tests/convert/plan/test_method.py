"""Names of methods."""

import pytest

from lowbit.convert.plan.method import ABSMAX, Method
from lowbit.convert.plan.recipe import Recipe
from lowbit.formats.errors import QuantizationError

NAMES = {
    "rtn": Method(),
    "weighted": Method("weighted"),
    "gptq": Method("gptq"),
    "gptq+rotate": Method("gptq", rotate=True),
    "gptq+rotate+autoround": Method("gptq", rotate=True, autoround=True),
    "autoround": Method("rtn", autoround=True),
    "weighted+autoround": Method("weighted", autoround=True),
}


@pytest.mark.parametrize("text", NAMES)
def test_names(text: str) -> None:
    method = Method.parse(text)
    assert method == NAMES[text]
    assert str(method) == text
    assert method.calibrated == (text != "rtn")


def test_rtn_may_be_said() -> None:
    assert Method.parse("rtn+autoround") == Method.parse("autoround")


@pytest.mark.parametrize(
    "text",
    [
        *("", "+", "awq", "gptq+", "+gptq", "gptq+distill", "gptq+gptq", "rtn+weighted"),
        *("rotate", "weighted+rotate", "gptq+autoround+rotate", "gptq+rotate+rotate"),
    ],
)
def test_no_names(text: str) -> None:
    with pytest.raises(QuantizationError, match="is not known") as caught:
        Method.parse(text)
    assert "gptq+rotate" in str(caught.value.hint)


def test_absmax_is_recorded_as_rounding_with_its_scales() -> None:
    for positive in (False, True):
        recipe = Recipe(method=Method.parse("absmax"), positive_scales=positive)
        content = recipe.to_json()
        assert (content["method"], content["scales"]) == ("rtn", "absmax")
        assert Recipe.from_json(content) == Recipe(method=ABSMAX)
    assert not ABSMAX.calibrated
