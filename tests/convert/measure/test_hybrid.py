"""Reports of a hybrid model: block by block gives what transformers gives on the whole."""

import logging
from pathlib import Path

import pytest

from lowbit.convert import Recipe
from lowbit.convert.measure.build import measure_sizes
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.measure.weights import measure_weights
from lowbit.convert.original.quiet import without_advice
from lowbit.formats.packed import open_packed
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert
from tests.convert.measure.conftest import Measure

CHARACTERS = 1100  # two windows of 128 tokens


@pytest.fixture(scope="module")
def hybrid() -> Path:
    return Path(__file__).parents[3] / "examples/models/tiny-qwen3.5"


def test_weights_and_sizes_are_those_of_the_conversion(short_hybrid: Path, tmp_path: Path) -> None:
    """Logits of the same pair are in test_measure.py."""
    done = convert(short_hybrid, tmp_path / "out", Recipe())
    assert measure_weights(open_pair(short_hybrid, done.folder)) == done.weights
    sizes = measure_sizes(open_packed(done.folder), open_checkpoint(short_hybrid))
    assert sizes.bits_per_weight == done.plan.bits_per_weight


@pytest.mark.commands
@pytest.mark.parametrize(("base", "most"), [("int8", 0.001), ("int4", 0.018)])
def test_perplexity(
    hybrid: Path, tmp_path: Path, stories: str, measure: Measure, base: str, most: float
) -> None:
    folder = convert(hybrid, tmp_path / "out", Recipe(base)).folder  # type: ignore[arg-type]
    found = measure(hybrid, folder, stories=stories[:CHARACTERS]).logits  # one window
    assert abs(found.perplexity_change) < most
    assert 0 < found.kl_mean < {"int8": 0.0003, "int4": 0.02}[base]


def test_advice_about_kernels_is_kept_from_the_terminal(
    hybrid: Path, stories: str, measure: Measure, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers.utils.logging  # noqa: F401 - gives loggers their warning_once

    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    child = logging.getLogger("transformers.models.some_model")
    try:
        child.warning("`f` is falling back to its reference PyTorch implementation: before")
        with without_advice():
            child.warning("`f` is falling back to its reference PyTorch implementation: inside")
            child.warning("something is wrong")
        child.warning("The fast path is not available: after")
        logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
        measure(hybrid, hybrid, stories=stories[:600])
    finally:
        logger.removeHandler(caplog.handler)
    said = [message.rpartition(" ")[2] for message in dict.fromkeys(caplog.messages)]
    assert said == ["before", "wrong", "after"]
