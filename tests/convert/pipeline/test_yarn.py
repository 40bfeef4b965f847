"""Models with YaRN from the original to the report, beside transformers on the whole model."""

import io
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.convert import Recipe
from lowbit.convert.measure.measure import measure_logits
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.threads import alone_on_threads
from lowbit.convert.original.walk import pass_through_all
from lowbit.convert.original.weights import open_weights
from lowbit.convert.pipeline.verification import verify_folder
from lowbit.convert.plan.method import RTN, Method
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.convert.texts.evaluation import Text, tokenize
from tests.conversions import convert

CPU = torch.device("cpu")
ORIGINAL = 64  # positions of the models as stated here; windows are of 256
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
METHODS = {"short": Method.parse("gptq"), "short_hybrid": RTN}


def stated(folder: Path, out: Path) -> Path:
    """A copy of a bundled model of 64 positions, times four by YaRN; the config as cards have it.

    64 positions are not what it was trained for: only its arithmetic is compared here.
    """
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    text["max_position_embeddings"] = ORIGINAL
    text["rope_parameters"] |= YARN
    (out / "config.json").write_text(json.dumps(config))
    return out


def text_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    return text


@pytest.fixture(scope="module", params=METHODS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def source(
    kind: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder: Path = request.getfixturevalue(kind)
    return stated(folder, tmp_path_factory.mktemp("yarn") / "source")


def whole_hidden(folder: Path, windows: Tensor) -> Tensor:
    """What transformers' own model gives after its last layer, before the final norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        model(windows)
    return seen[0]


@pytest.mark.filterwarnings("ignore")  # other libraries' own
def test_the_original_runs_as_in_transformers(source: Path, stories: str) -> None:
    windows = tokenize(source, [Text("test", "test", stories[:3000])], 4 * ORIGINAL)[0].windows
    assert windows.shape[1] == 256
    expected = whole_hidden(source, windows)
    model = load_layered_model(open_weights(source), windows.shape[1], CPU)
    with torch.inference_mode(), alone_on_threads(CPU) as pool:
        found = pass_through_all(model, windows, CPU, pool, lambda _: None)
    off = (found - expected).abs().amax(dim=(0, 2)) / expected.abs().max()
    assert off[:ORIGINAL].max() < 1e-5
    assert off[ORIGINAL:].max() < 1e-5


def test_a_config_as_cards_have_it_is_no_reason_to_warn(short: Path, tmp_path: Path) -> None:
    source = stated(short, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 80}))
    said = io.StringIO()
    handler, logger = logging.StreamHandler(said), logging.getLogger("transformers")
    once: Any = logging.Logger.warning_once  # type: ignore[attr-defined]  # of transformers
    once.cache_clear()
    logger.addHandler(handler)
    try:
        model = load_layered_model(open_weights(source), 8, CPU)
    finally:
        logger.removeHandler(handler)
    assert len(model.layers) == 2
    assert said.getvalue() == ""


@pytest.mark.commands
@pytest.mark.filterwarnings("ignore")
def test_a_conversion_keeps_yarn_and_measures_with_it(
    source: Path, tmp_path: Path, stories: str, kind: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(stories[:12_000])
    made = convert(
        source,
        tmp_path / "out",
        Recipe(method=METHODS[kind]),
        calibration=CalibrationRequest(text, samples=4, length=512),
    )
    before, after = (text_of(folder) for folder in (source, made.folder))
    for key in ("rope_parameters", "max_position_embeddings"):
        assert after[key] == before[key]
    if made.manifest.calibration is not None:
        assert made.manifest.calibration.length == 4 * ORIGINAL  # cut to what YaRN gives
    verify_folder(made.folder, str(source), lambda phase, done, total: None)
    found = measure_logits(
        open_pair(source, made.folder), [Text("test", "test", stories[:3000])]
    ).logits
    assert found.window == 4 * ORIGINAL
    assert 0 < found.kl_mean < 0.1
