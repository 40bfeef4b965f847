"""`--effort`: the way that it stands for, by facts alone."""

from dataclasses import replace
from typing import Any

import click
import pytest

from lowbit.convert.cli.quantize import quantize
from lowbit.convert.plan.calibration_cost import Shapes, Windows
from lowbit.convert.plan.effort import (
    EFFORTS,
    LIMITS,
    Effort,
    Facts,
    Way,
    choose_way,
    parse_effort,
    way_seconds,
    ways,
)
from lowbit.convert.plan.method import Method
from lowbit.formats.errors import QuantizationError

MACHINE = "this machine"


def shapes(layers: int, h: int, kv: int, mlp: int, vocabulary: int, routed: bool = False) -> Shapes:
    """Shapes of a dense model."""
    layer = ((h, h), (kv, h), (kv, h), (h, h), (mlp, h), (mlp, h), (h, mlp))
    weights = layers * sum(N * K for N, K in layer)
    return Shapes(
        layers=(layer,) * layers,
        inputs=((h, h, h, mlp),) * layers,
        solved=(*layer * layers, (vocabulary, h)),
        together=frozenset({(h + 2 * kv, h), (h, h), (2 * mlp, h), (h, mlp)}),
        vocabulary=vocabulary,
        hidden=h,
        active=weights,
        routed=routed,
    )


MODELS = {
    "tiny": shapes(6, 256, 128, 768, 4096),
    "135M": shapes(30, 576, 192, 1536, 49152),
    "0.5B": shapes(24, 896, 128, 4864, 151936),
    "1.5B": shapes(28, 1536, 256, 8960, 151936),
    "8B": shapes(36, 4096, 1024, 12288, 151936),
    "32B": shapes(64, 5120, 1024, 25600, 151936),
}


def facts(model: str, device: str = "cpu", units: int = 2, **changed: Any) -> Facts:
    made = MODELS[model]
    return replace(
        Facts(
            device=device,
            units=units,
            shapes=made,
            sets=4 * len(made.layers) + 1,
            windows=Windows(64 if device == "cpu" else 128, 512),
            learned=Windows(16 if device == "cpu" else 64, 512),
            measured=Windows(2 if device == "cpu" else 8, 512),
            estimated=Windows(8, 512),
            rotatable=True,
        ),
        **changed,
    )


def chosen(effort: Effort, known: Facts) -> str:
    return str(choose_way(effort, known, lambda way: True, MACHINE).way)


MEASURED, ESTIMATED = ", bits by measured costs", ", bits by estimated costs"
FINEST = ", bits and groups by measured costs"
PLAIN, LEARNED = "gptq+rotate", "gptq+rotate+autoround"


@pytest.mark.parametrize(
    ("model", "device", "units", "way"),
    [
        ("tiny", "cpu", 1, PLAIN + ESTIMATED),
        ("135M", "cpu", 1, PLAIN + ESTIMATED),
        ("135M", "cpu", 2, LEARNED + ESTIMATED),
        ("0.5B", "cpu", 2, PLAIN + ESTIMATED),
        ("1.5B", "cpu", 2, "weighted" + ESTIMATED),
        ("1.5B", "cpu", 6, PLAIN + ESTIMATED),
        ("8B", "cpu", 2, "rtn"),
        ("8B", "cpu", 3, "weighted"),
        ("8B", "cpu", 64, PLAIN + ESTIMATED),
        ("tiny", "cuda", 132, PLAIN + MEASURED),
        ("135M", "cuda", 132, LEARNED + MEASURED),
        ("1.5B", "cuda", 132, LEARNED + MEASURED),
        ("8B", "cuda", 132, PLAIN + MEASURED),
        ("8B", "cuda", 28, PLAIN + ESTIMATED),
        ("32B", "cuda", 132, PLAIN + ESTIMATED),
    ],
)
def test_default_takes_the_best_within_its_time(
    model: str, device: str, units: int, way: str
) -> None:
    assert LIMITS == {"cpu": 3600, "cuda": 600}
    assert chosen("default", facts(model, device, units)) == way


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_low_reads_no_text_and_high_takes_the_best(model: str, device: str) -> None:
    assert chosen("low", facts(model, device)) == "rtn"
    assert chosen("high", facts(model, device)) == LEARNED + FINEST


@pytest.mark.parametrize(
    ("changed", "default", "high"),
    [
        ({"rotatable": False}, "gptq" + ESTIMATED, "gptq+autoround" + FINEST),
        ({"fixed_bits": "--bits gives them"}, PLAIN, LEARNED),
        ({"uncalibrated": "8 bits"}, "rtn", "rtn"),
        ({"shapes": replace(MODELS["tiny"], routed=True)}, "gptq", "gptq"),
    ],
)
def test_models_differ(changed: dict[str, Any], default: str, high: str) -> None:
    known = facts("tiny", **changed)
    assert chosen("default", known) == default
    assert chosen("high", known) == high
    assert chosen("low", known) == "rtn"


@pytest.mark.parametrize("effort", EFFORTS)
def test_an_effort_says_why_and_what_more_would_bring(effort: Effort) -> None:
    made = choose_way(effort, facts("0.5B"), lambda way: True, MACHINE)
    assert (
        made.reason
        == {
            "low": "it reads no text",
            "default": "the best by estimated costs that "
            f"{MACHINE} usually finishes within an hour",
            "high": "the best there is",
        }[effort]
    )
    if effort == "high":
        assert made.better is None
    else:
        assert str(made.better) == LEARNED + FINEST
        assert made.better_seconds > made.seconds


def test_a_measured_speed_changes_the_times_alone() -> None:
    def fits(way: Way) -> bool:
        return True

    usual = choose_way("default", facts("0.5B"), fits, MACHINE)
    slow = choose_way("default", facts("0.5B"), fits, MACHINE, 1e9)
    assert (slow.way, slow.reason, slow.better) == (usual.way, usual.reason, usual.better)
    assert slow.seconds > LIMITS["cpu"] > usual.seconds
    assert slow.better_seconds > usual.better_seconds


def test_a_small_model_is_told_why_it_gets_no_autoround() -> None:
    made = choose_way("default", facts("tiny", "cuda", 132), lambda way: True, MACHINE)
    assert made.reason == "autoround is measured on larger models alone"


def test_groups_alone_may_be_left_to_high() -> None:
    made = choose_way("default", facts("0.5B", "cuda", 132), lambda way: True, MACHINE)
    assert (str(made.way), str(made.better)) == (LEARNED + MEASURED, LEARNED + FINEST)
    assert made.seconds == made.better_seconds
    assert made.reason == "the best in groups that are as fast for many sequences together"


def test_given_bits_are_told_where_a_text_is_read() -> None:
    known = facts("0.5B", fixed_bits="--bits gives them")
    told = [choose_way(effort, known, lambda way: True, MACHINE).fixed_bits for effort in EFFORTS]
    assert told == [None, "--bits gives them", "--bits gives them"]


def test_a_small_memory_falls_back_to_what_fits() -> None:
    def fits(way: Way) -> bool:
        return way.costs is None and not way.method.autoround

    made = choose_way("high", facts("0.5B"), fits, MACHINE)
    assert (str(made.way), made.better) == (PLAIN, None)
    assert made.reason == f"the memory is too small for {LEARNED}{FINEST}"
    none = choose_way("default", facts("8B", "cuda", 132), lambda way: False, MACHINE)
    assert str(none.way) == "rtn"


def test_a_gpu_calibrates_however_long_it_takes() -> None:
    known = facts("32B", "cuda", 10)
    made = choose_way("default", known, lambda way: True, MACHINE)
    assert made.seconds > LIMITS["cuda"]
    assert made.way == Way(Method("gptq", rotate=True), "estimated")
    assert made.reason == f"no less than gptq on {MACHINE}"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device", "units"), [("cpu", 2), ("cuda", 132)])
def test_times_are_near_those_measured(model: str, device: str, units: int) -> None:
    known = facts(model, device, units)
    of = {str(way): way_seconds(known, way) for way in ways(known, groups=False)}
    assert of["rtn"] < of["weighted"] < of[PLAIN] < of[PLAIN + MEASURED] < of[LEARNED + MEASURED]
    if (model, device) == ("135M", "cpu"):
        assert of[PLAIN] == pytest.approx(7.5 * 60, rel=0.1)
    if (model, device) == ("8B", "cuda"):
        assert of[PLAIN] == pytest.approx(157, rel=0.5)


@pytest.mark.parametrize("text", ["", "Default", "medium", "low\n", "auto", "1"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(QuantizationError, match="is not known"):
        parse_effort(text)
    assert [parse_effort(word) for word in EFFORTS] == list(EFFORTS)


def test_the_command_knows_every_effort() -> None:
    option = next(option for option in quantize.params if option.name == "effort")
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == EFFORTS
