"""Variants on record: what is kept, what gives way, what is refused."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lowbit.convert import Recipe
from lowbit.convert.measure.record import QualityReport, Sizes
from lowbit.convert.measure.speed import Speed
from lowbit.convert.plan.method import Method
from lowbit.convert.report.comparison import FolderRow
from lowbit.convert.report.files import write_reports
from lowbit.convert.report.formatting import MISSING
from lowbit.convert.report.variants import (
    Variant,
    added,
    check_record,
    read_variants,
    variants_page,
    write_variants,
)
from lowbit.convert.report.verdict import Verdict
from lowbit.formats.errors import CheckpointError, FormatError, LowbitError, RequestError
from lowbit.formats.packed import open_packed
from lowbit.formats.tasks import TaskReport, TaskResult, manifest_sha256, write_tasks
from tests.conversions import convert
from tests.convert.report.pages import Page
from tests.convert.report.samples import LOGITS

if TYPE_CHECKING:
    from tests.convert.conftest import Cli

TINY = Path("examples/models/tiny-qwen3")
SIZES = Sizes(6_000_000, None, 4.25)
SPEED = Speed("NVIDIA H200", 64, 128, 8192, 0.01, 831.96, 5_000, 6_000)
SCORED = TaskResult("gsm8k", "acc", 0.5, 0.1, 9, True, 0, None, False, 512, "cpu", "bf16", "1")
ROW = FolderRow(
    name="qwen3-8b-int4",
    folder="qwen3-8b-int4",
    verdict=Verdict("usable", "good", "Usable", "mean KL 0.0321", notes=("A note.",)),
    method="gptq+rotate",
    schemes="INT4 g128",
    folder_bytes=5_500_000_000,
    bits_per_weight=4.5,
    kl_mean=0.0321,
    kl_error=0.0004,
    difference=None,
    kl_p99=0.4,
    top1_agreement=0.93,
    perplexity=9.1,
    perplexity_change=0.01,
    logit_cosine=0.99,
    weight_cosine=0.99,
    manifest_sha256="aa",
    command="lowbit-convert Qwen/Qwen3-8B qwen3-8b-int4",
    speed=SPEED,
    tasks=(
        replace(SCORED, metric="exact_match", value=0.8123, stderr=0.011, samples=1319),
        replace(SCORED, task="x", value=None, stderr=None, higher_is_better=None),
    ),
)
ONE = Variant("2026-05-31", "Qwen/Qwen3-8B", "WikiText-2", 40_000, ROW)


def changed(variant: Variant, **figures: Any) -> Variant:
    """The variant with other figures in its row."""
    return replace(variant, row=replace(variant.row, **figures))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    assert read_variants(path) == []
    unknown = Verdict(None, "unknown", "Not judged", "", hint="measure")
    several = [ONE, changed(ONE, name="other", speed=None, tasks=(), manifest_sha256=None)]
    several.append(changed(ONE, kl_mean=math.inf, kl_error=None, verdict=unknown, command=None))
    page = write_variants(path, several)
    assert (read_variants(path), page) == (several, tmp_path / "choices.html")
    assert json.loads(path.read_text())["schema"] == 2


def test_what_is_measured_anew_gives_way() -> None:
    other = changed(ONE, manifest_sha256="bb", name="mixed")
    before = [ONE, other]
    again = replace(changed(ONE, kl_mean=0.03), recorded_on="2026-06-01")
    assert added(before, [again]) == [other, again]
    for new in (
        replace(ONE, text_name="code"),
        changed(ONE, speed=replace(SPEED, device="cpu")),
        changed(ONE, speed=None),
        changed(ONE, manifest_sha256="cc"),
        replace(ONE, original="Qwen/Qwen3-4B"),
    ):
        assert added(before, [new]) == [*before, new]
    unknown = changed(ONE, manifest_sha256=None)
    assert added([unknown], [changed(unknown, name="another")])[0] == unknown


def test_the_page_shows_every_figure() -> None:
    evil = changed(ONE, name="<script>", command="<b>", manifest_sha256="dd")
    evil = replace(evil, original="a\x1bb")
    page = Page(variants_page([ONE, evil]))
    for words in (
        "2 variants of Qwen/Qwen3-8B",
        "0.0321 ± 0.0004",
        "832.0 tok/s on NVIDIA H200",
        "gsm8k exact_match 0.8123 ± 0.0110",
        f"x acc {MISSING}",
        "WikiText-2, 40,000 tokens",
        "lowbit-convert Qwen/Qwen3-8B qwen3-8b-int4",
        "2026-05-31, gptq+rotate, INT4 g128",
        "5.50 GB",
    ):
        assert words in page.text, words
    text = variants_page([ONE, evil])
    assert "<script" not in text
    assert "\x1b" not in text
    assert page.text.index("<script>") < page.text.index("qwen3-8b-int4"), "the latest first"


Content = dict[str, Any]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 1}, "schema 1"),
        ({"variants": {}}, "variants"),
        ({"variants": [{}]}, "missing keys"),
        ({"more": 1}, "unknown keys"),
    ],
)
def test_a_record_of_another_kind(tmp_path: Path, change: Content, words: str) -> None:
    path = tmp_path / "choices.json"
    write_variants(path, [ONE])
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError, match=words):
        check_record(path)


@pytest.mark.parametrize("figure", [("kl_mean", -1.0), ("top1_agreement", 2.0), ("kl_error", "x")])
def test_figures_that_cannot_be(tmp_path: Path, figure: tuple[str, object]) -> None:
    path = tmp_path / "choices.json"
    write_variants(path, [ONE])
    content = json.loads(path.read_text())
    content["variants"][0]["row"][figure[0]] = figure[1]
    path.write_text(json.dumps(content))
    with pytest.raises(FormatError, match=figure[0]):
        read_variants(path)


def test_files_that_are_no_record(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not end in"):
        check_record(tmp_path / "choices.txt")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(FormatError, match="schema None"):
        check_record(tmp_path / "config.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(LowbitError):
        check_record(tmp_path / "link.json")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("variants")
    recipe = Recipe(method=Method.parse("rtn"))
    return convert(TINY, place / "packed", recipe).folder


@pytest.fixture
def packed(converted: Path) -> Iterator[Path]:
    """A conversion with its report, and without other files of measurements."""
    digest = manifest_sha256(converted)
    report = QualityReport(
        "0.1.0", digest, SIZES, (), LOGITS, "2026-05-31", "qwen3", 5_801_216, "lowbit-convert a b"
    )
    write_reports(open_packed(converted), report)
    yield converted
    for name in ("bench.json", "tasks.json"):
        (converted / name).unlink(missing_ok=True)


def test_a_comparison_is_added(cli: "Cli", packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    write_tasks(packed, TaskReport("0.1.0", "lm-eval 1", manifest_sha256(packed), (SCORED,)))
    write_variants(path, [ONE])
    done = cli("compare", packed, "--record", path)
    assert done.exit_code == 0, done.output
    assert "gsm8k 0.5000" in done.stdout
    assert f"recorded in {path}, shown in {path.with_suffix('.html')}" in done.stderr
    first, added_now = read_variants(path)
    new = added_now.row
    assert first == ONE
    assert (new.name, new.method, new.command) == ("packed", "rtn", "lowbit-convert a b")
    assert new.tasks == (SCORED,)
    assert (new.speed, new.folder) == (None, "packed"), "no path of this machine"
    assert cli("compare", packed, "--record", path).exit_code == 0
    assert len(read_variants(path)) == 2, "the same again"
    row = json.loads(cli("compare", packed, "--json").stdout)["rows"][0]
    assert row["manifest_sha256"] == manifest_sha256(packed)
    assert row["tasks"][0]["task"] == "gsm8k"


def test_results_of_an_earlier_conversion_are_left_out(
    cli: "Cli", packed: Path, tmp_path: Path
) -> None:
    write_tasks(packed, TaskReport("0.1.0", "lm-eval 1", "0" * 64, (SCORED,)))
    (packed / "bench.json").write_text("{")
    row = json.loads(cli("compare", packed, "--json").stdout)["rows"][0]
    assert (row["tasks"], row["speed"]) == ([], None)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--diff", "--record", "choices.json"), 2, "writes nothing"),
        (("--record", "choices.txt"), 1, "does not end in"),
        (("--record", "no/such/choices.json"), 2, "there is no folder"),
    ],
)
def test_what_is_refused(
    cli: "Cli", packed: Path, options: tuple[str, ...], code: int, words: str
) -> None:
    done = cli("compare", packed, *options)
    assert (done.exit_code, words in done.stderr) == (code, True), done.output


def test_a_folder_without_a_report(cli: "Cli", tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    done = cli("compare", tmp_path / "a", "--record", tmp_path / "choices.json")
    assert done.exit_code == 1
    assert "has no quality.json" in done.stderr


def test_other_files_are_never_replaced(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read_variants(tmp_path)
