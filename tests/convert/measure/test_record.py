"""quality.json: what is written is read back, what is foreign is refused."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lowbit.convert.measure.record import (
    Flip,
    Histogram,
    ImageQuality,
    Int8Inputs,
    LogitQuality,
    Noise,
    Position,
    QualityReport,
    Sizes,
    TextKind,
    Window,
    read_quality,
)
from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.mtp.drafting import Draft, Drafting
from lowbit.formats.errors import FormatError
from lowbit.formats.file_names import QUALITY_FILE
from lowbit.formats.judgement import read_judgement

SIZES = asdict(Sizes(1, 1, 4.0))


@pytest.fixture
def report() -> QualityReport:
    logits = LogitQuality(
        text_name="a text",
        text_sha256="ab" * 32,
        text_tokens=1030,
        window=512,
        windows=2,
        scored_tokens=1022,
        perplexity_original=3.0,
        perplexity_packed=3.3,
        log_ratio_error=None,
        kl_mean=0.01,
        kl_p95=0.07,
        kl_p99=0.1,
        kl_max=math.inf,
        cosine_mean=0.99,
        cosine_p1=0.9,
        top1_agreement=0.95,
        kl_histogram=Histogram(-8.0, 2.0, (1, 0, 1021)),
        window_series=(Window(1.0, 1.1, 0.01), Window(1.2, 1.3, 0.02)),
        device="cpu",
        torch_version="2",
        transformers_version="5",
        noise=Noise(0.0002, 0.001, 0.99),
        positions=(Position(0, 128, 256, 0.01, 0.9, 1.5, 1.6), Position(128, 200, 144, 0, 1, 1, 1)),
        kinds=(TextKind("maths", "cd" * 32, 1000, 2.0, 2.1, 0.01, 0.97, 0.1, 0.001),),
        flips=(Flip("maths", "one and\n", " one", " two", " three", 0.5, 0.25, 1.5),),
        kl_error=0.0004,
        drafting=Drafting(3, (Draft(100, 80, 0.8, 0.8, 1.8),), ()),
        int8_inputs=(Int8Inputs("maths", 2.2, 0.009, 0.2, 0.9, None, -0.001, 0.0002),),
        images=ImageQuality("ef" * 32, 12, 200, 1.1, 1.2, 0.004, 0.001, 0.1, 0.99, 11, 10),
    )
    rows = (
        WeightQuality("model.layers.0.mlp.up_proj", 4, 128, 1024, 0.99, 0.1, 20.0, 0.0),
        WeightQuality("model.layers.0.mlp.down_proj", 4, 32, 64, 1.0, 0.1, 20.0, 0.0, 0.07),
        WeightQuality("lm_head", 8, None, 1024, 1.0, 0.0, math.inf, 0.0),
    )
    return QualityReport(
        "0.1.0",
        "cd" * 32,
        Sizes(10, None, 4.5),
        rows,
        logits,
        "2026-05-31",
        "qwen3",
        596_049_920,
        "lowbit-convert a b",
        "Qwen/Qwen3-0.6B",
    )


def save(folder: Path, content: Any) -> None:
    (folder / "quality.json").write_text(json.dumps(content))


def test_round_trip(report: QualityReport, tmp_path: Path) -> None:
    (tmp_path / "quality.json").write_bytes(report.to_bytes())
    assert read_quality(tmp_path) == report


def test_overfitting_is_kept(report: QualityReport, tmp_path: Path) -> None:
    known = replace(report, held_out_excess=0.4)
    save(tmp_path, known.to_json())
    assert read_quality(tmp_path) == known


@pytest.mark.parametrize(
    "part",
    [
        (),
        ("logits",),
        ("logits", "kinds", 0),
        ("logits", "int8_inputs", 0),
        ("logits", "images"),
        ("weights", 0),
    ],
)
def test_every_key_is_required(
    report: QualityReport, tmp_path: Path, part: tuple[str | int, ...]
) -> None:
    whole = report.to_json()
    place: Any = whole
    for key in part:
        place = place[key]
    for key in place.keys() - {"sha256"}:
        value = place.pop(key)
        save(tmp_path, whole)
        with pytest.raises(FormatError, match=rf"missing keys \['{key}'\]|schema None"):
            read_quality(tmp_path)
        place[key] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("logits", "kl_mean"), math.nan, "`kl_mean` cannot be NaN"),
        (("logits", "kl_mean"), -0.1, "`kl_mean` is -0.1, expected 0 to inf"),
        (("logits", "kl_mean"), 10**400, "`kl_mean` cannot be 1000"),
        (("logits", "scored_tokens"), 10**30, "`scored_tokens` cannot be 1000"),
        (("logits", "scored_tokens"), 0, "`scored_tokens` is 0, expected 1"),
        (("logits", "windows"), -3, "`windows` is -3"),
        (("logits", "window"), 1, "`window` is 1, expected 2"),
        (("logits", "top1_agreement"), 1.5, "`top1_agreement` is 1.5, expected 0 to 1"),
        (("logits", "perplexity_original"), 0.0, "`perplexity_original` is 0, expected 0.001"),
        (("logits", "cosine_mean"), -2.0, "`cosine_mean` is -2"),
        (("logits", "kl_histogram", "high_exponent"), 1e9, "`high_exponent` is 1e.09"),
        (("logits", "kl_histogram", "low_exponent"), 5.0, "`high_exponent` is 2, expected more"),
        (("logits", "kl_histogram", "counts"), [], "0 `counts`, expected 1 to 1,000"),
        (("logits", "kl_histogram", "counts"), [1, -1], "`counts` is -1"),
        (("logits", "window_series", 0, "kl"), math.nan, "`kl` cannot be NaN"),
        (("logits", "kinds", 0, "tokens"), 0, "logits: kinds`: `tokens` is 0"),
        (("logits", "positions", 0, "stop"), 0, "positions`: `stop` is 0"),
        (("logits", "positions", 1, "start"), 500, "`stop` is 200, expected more than `start`"),
        (("logits", "flips", 0, "p_packed"), 3.0, "flips`: `p_packed` is 3"),
        (("logits", "window_series"), {}, "logits: window_series` is not a list"),
        (("logits", "images", "pictures"), 0, "images`: `pictures` is 0"),
        (("logits", "images", "read_packed"), -1, "`read_packed` is -1"),
        (("logits", "images"), [], "images` is not an object|`images` cannot be"),
        (("logits", "positions"), None, "logits: positions` is not a list"),
        (("weights", 0, "weights"), 0, "weights`: `weights` is 0"),
        (("weights", 0, "bits"), 999, "`bits` is 999, expected 1 to 16"),
        (("weights", 0, "clipped_share"), -1, "`clipped_share` is -1"),
        (("sizes", "source_bytes"), 0, "sizes`: `source_bytes` is 0"),
        (("sizes", "folder_bytes"), -1, "`folder_bytes` is -1"),
        (("sizes", "vision_bytes"), -1, "`vision_bytes` is -1"),
        (("sizes", "vision_dropped"), -1, "`vision_dropped` is -1"),
        (("parameters",), 0, "`parameters` is 0"),
    ],
)
def test_figures_that_cannot_be(
    report: QualityReport, tmp_path: Path, path: tuple[str | int, ...], value: Any, message: str
) -> None:
    content = report.to_json()
    place: Any = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    save(tmp_path, content)
    with pytest.raises(FormatError, match=message):
        read_quality(tmp_path)


def test_without_logits(report: QualityReport, tmp_path: Path) -> None:
    save(tmp_path, replace(report, logits=None).to_json())
    found = read_quality(tmp_path)
    assert found is not None
    assert found.logits is None


def test_any_changed_figure_is_told(report: QualityReport, tmp_path: Path) -> None:
    raw = report.to_bytes({"grade": "usable", "title": "Usable"})
    path = tmp_path / QUALITY_FILE
    seal = raw.rindex(b'"sha256"')  # without which nothing else is changed
    places = [place for place in range(seal) if raw[place : place + 1].isdigit()]
    for place in places[:: max(1, len(places) // 60)]:
        digit = b"5" if raw[place : place + 1] == b"4" else b"4"
        changed = raw[:place] + digit + raw[place + 1 :]
        path.write_bytes(changed)
        if json.loads(changed) == json.loads(raw):  # a digit that a double does not hold
            assert read_quality(tmp_path) == report
            continue
        with pytest.raises(FormatError):
            read_quality(tmp_path)
        with pytest.raises(FormatError):
            read_judgement(tmp_path)
    path.write_bytes(raw.replace(b'"Usable"', b'"Unable"'))
    for read in (read_quality, read_judgement):
        with pytest.raises(FormatError, match="was changed or damaged after it was written") as e:
            read(tmp_path)
        assert e.value.hint == "make the report again with `lowbit-convert report`"
    path.write_bytes(raw)
    assert read_quality(tmp_path) == report


def test_a_report_of_before_has_no_seal(report: QualityReport, tmp_path: Path) -> None:
    content = report.to_json()
    del content["sha256"]
    save(tmp_path, content)
    assert read_quality(tmp_path) == report


def test_infinity_is_null(report: QualityReport) -> None:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    content = json.loads(report.to_bytes(), parse_constant=refuse)
    assert content["schema"] == 4
    assert content["weights"][2]["sqnr_db"] is None
    assert content["logits"]["kl_max"] is None


def test_no_report(tmp_path: Path) -> None:
    assert read_quality(tmp_path) is None


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"schema": 3}, "schema 3, this release reads 4"),
        ({"schema": None}, "schema None"),
        ({"surprise": 1}, r"unknown keys \['surprise'\]"),
        ({"weights": {}}, "weights` is not a list"),
        ({"weights": [{"name": "x"}]}, "missing keys"),
        ({"weights": [3]}, "is not an object"),
        ({"sizes": None}, "sizes` is not an object"),
        ({"sizes": SIZES | {"folder_bytes": "1"}}, 'be "1"'),
        ({"sizes": SIZES | {"folder_bytes": True}}, "be true"),
        ({"sizes": SIZES | {"vision_dtypes": 16}}, "`vision_dtypes` cannot be 16"),
        ({"logits": []}, "logits` is not an object"),
        ({"logits": {}}, r"logits`: missing keys .*'window_series'"),
        ({"command": 3}, "`command` cannot be 3"),
        ({"manifest_sha256": 7}, "`manifest_sha256` cannot be 7"),
    ],
)
def test_foreign_content(
    report: QualityReport, tmp_path: Path, edit: dict[str, Any], message: str
) -> None:
    save(tmp_path, report.to_json() | edit)
    with pytest.raises(FormatError, match=message):
        read_quality(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_not_an_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "quality.json").write_text(text)
    with pytest.raises(FormatError, match=r"not valid JSON|does not hold a JSON object"):
        read_quality(tmp_path)


@pytest.mark.parametrize("key", ["kl_mean", "kl_p95", "window_series", "kl_histogram", "kinds"])
def test_incomplete_logits(report: QualityReport, tmp_path: Path, key: str) -> None:
    content = report.to_json()
    del content["logits"][key]
    save(tmp_path, content)
    with pytest.raises(FormatError, match="logits"):
        read_quality(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("noise", []), ("flips", [3]), ("positions", {}), ("drafting", 1)]
)
def test_foreign_parts_of_the_logits(
    report: QualityReport, tmp_path: Path, key: str, value: Any
) -> None:
    content = report.to_json()
    content["logits"][key] = value
    save(tmp_path, content)
    with pytest.raises(FormatError, match=f"logits: {key}` is not"):
        read_quality(tmp_path)


@pytest.mark.parametrize(("count", "words"), [(0, "0 `packed`"), (5, "5 `packed`, expected 1")])
def test_drafts_of_no_round(report: QualityReport, tmp_path: Path, count: int, words: str) -> None:
    content = report.to_json()
    content["logits"]["drafting"]["packed"] *= count
    save(tmp_path, content)
    with pytest.raises(FormatError, match=words):
        read_quality(tmp_path)
