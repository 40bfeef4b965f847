"""Parameters of sampling: their ranges, and those of a generation_config.json."""

from typing import Any

import pytest

from lowbit.formats.errors import RequestError
from lowbit.formats.generation import GenerationConfig
from lowbit.runtime.state.sampling import SamplingParams, sampling_defaults


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("seed", -1),
    ],
)
def test_values_without_a_meaning_are_refused(name: str, value: float) -> None:
    values: dict[str, Any] = {name: value}
    with pytest.raises(RequestError, match=f"`{name}` must be"):
        SamplingParams(**values)


def test_defaults_are_those_of_the_generation_config() -> None:
    config = GenerationConfig(0.6, 20, 0.95, 0.1, 1.1, 0.5, eos_token_ids=(7,))
    assert sampling_defaults(config) == SamplingParams(0.6, 20, 0.95, 0.1, 1.1, 0.5, seed=None)
    assert sampling_defaults(GenerationConfig()) == SamplingParams()
