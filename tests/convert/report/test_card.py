"""The model card: metadata that the Hub's library reads, figures, warnings, nothing injected."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import EvalResult, ModelCard
from hypothesis import given
from hypothesis import strategies as st

from lowbit.convert.measure.record import Noise, QualityReport, TextKind
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.report.card import render_card
from lowbit.convert.report.formatting import MISSING
from lowbit.convert.report.source_card import SourceCard, read_source_card
from lowbit.convert.report.verdict import judge
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import CheckpointError
from lowbit.formats.kept_vocabulary import KeptVocabulary, TextLength
from lowbit.formats.layout.manifest import Manifest, Source
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.packed import PackedCheckpoint
from lowbit.formats.safetensors.checkpoint import Checkpoint, TensorInfo
from lowbit.formats.tasks import TaskReport, TaskResult
from tests.convert.report.pages import numbers, table
from tests.convert.report.samples import linear, make_report

UP, HEAD = "model.layers.0.mlp.up_proj", "lm_head"
SHAPE = (256, 128)
INT4 = {UP: Scheme(4, 128), HEAD: Scheme(8, 128)}
APACHE = SourceCard(license="apache-2.0", languages=("en", "zh"))
VISION = TensorInfo("visual.x", torch.bfloat16, (2,), "model.safetensors", 0, 4)


def manifest(repo: str | None, **recipe: Any) -> Manifest:
    return Manifest("0.1.0", Source(repo, "c0ffee", "", ""), recipe, (), (), ())


def packed(
    schemes: dict[str, Scheme] | None = None,
    made: Manifest | None = None,
    shape: tuple[int, int] = SHAPE,
    vision: bool = False,
) -> PackedCheckpoint:
    """An MLP linear and a head of these schemes."""
    return PackedCheckpoint(
        checkpoint=Checkpoint(Path("folder"), {"model_type": "qwen3"}, {}),
        specs=(
            TensorSpec(f"{UP}.weight", shape, "mlp"),
            TensorSpec("lm_head.weight", SHAPE, "head"),
        ),
        schemes=INT4 if schemes is None else schemes,
        carried=(VISION,) if vision else (),
        manifest=made,
    )


def render(
    report: QualityReport | None,
    opened: PackedCheckpoint | None = None,
    source: SourceCard = APACHE,
    tasks: TaskReport | None = None,
    name: str = "m",
    target: str = "FOLDER",
) -> str:
    opened = opened or packed(made=manifest("Qwen/Qwen3-0.6B", recipe="int4", method="rtn"))
    return render_card(opened, report, tasks, source, name, target)


def metadata(card: str) -> dict[str, Any]:
    """Metadata as huggingface_hub reads it."""
    data: Any = ModelCard(card, ignore_metadata_errors=False).data
    found: dict[str, Any] = data.to_dict()
    return found


def figures(card: str, key: str) -> dict[tuple[str, str], float]:
    """Measured values by dataset (its name or type) and metric."""
    data: Any = ModelCard(card).data
    results: list[EvalResult] = data.eval_results
    assert {row.task_type for row in results} == {"text-generation"}
    return {(getattr(row, key), row.metric_type): row.metric_value for row in results}


def test_metadata() -> None:
    card = render(make_report())
    found = metadata(card)
    index = found.pop("model-index")
    assert found == {
        "base_model": "Qwen/Qwen3-0.6B",
        "base_model_relation": "quantized",
        "license": "apache-2.0",
        "language": ["en", "zh"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["compressed-tensors", "lowbit", "int4"],
    }
    assert [entry["name"] for entry in index] == ["m"]
    assert "TODO" not in card


@pytest.mark.parametrize(
    ("scales", "group", "warned"),
    [("signed", 128, True), ("positive", 128, False), ("signed", None, False)],
)
def test_negative_scales_are_a_warning(scales: str, group: int | None, warned: bool) -> None:
    made = manifest(None, recipe="int4", method="rtn", scales=scales)
    card = render(None, packed({UP: Scheme(4, group)}, made))
    assert ("read scales of groups as unsigned" in card) == warned
    assert "vllm serve" in card


def test_measured_quality_is_in_the_index() -> None:
    kinds = (
        TextKind("prose", "ab" * 32, 9, 3.286, 3.354, 0.018, 0.94, 0.2),
        TextKind("maths", "cd" * 32, 9, 2.0, 2.1, 0.02, 0.93, 0.2),
        TextKind("odd", "ef" * 32, 9, 2.0, float("inf"), 0.02, 0.93, 0.2),
    )
    card = render(make_report(kinds=kinds, noise=Noise(0.002, 0.02, 0.99)))
    found = figures(card, "dataset_name")
    assert found["a text", "perplexity"] == 3.354
    assert found["a text", "kl_divergence"] == 0.018
    assert found["maths", "perplexity"] == 2.1
    assert ("odd", "perplexity") not in found  # JSON has no infinity
    assert not any(name == "prose" for name, _ in found)  # the first text under its own name
    rows = {row[0]: [number for cell in row[1:] for number in numbers(cell)] for row in table(card)}
    assert rows["maths"] == [2, 2.1, 5, 0.02, 93]
    assert rows["the same of BF16 arithmetic alone, mean / p99"] == [0.002, 0.02]
    assert rows["KL divergence, mean / p95 / p99 / max (nats)"] == [0.018, 0.07, 0.13, 0.68]
    assert rows["perplexity"] == [3.286, 3.354, 2.07, 0.08]
    assert rows["up_proj"] == [4, 128, 2, 10, 10]


def test_task_results() -> None:
    rows = (
        TaskResult(
            "gsm8k", "exact_match", 0.5, 0.01, 100, True, 5, None, True, 4096, "cuda", "bf16", "3"
        ),
        TaskResult(
            "odd", "acc", None, None, 1, None, None, None, False, 64, "cpu", "int8", "1", "int8"
        ),
    )
    card = render(make_report(), tasks=TaskReport("0.1.0", "lm-eval 0.4.13", None, rows))
    assert figures(card, "dataset_type")["gsm8k", "exact_match"] == 0.5
    found = {row[0]: row[1:] for row in table(card)}
    assert found["gsm8k"] == ["exact_match", "0.5000 ± 0.0100", "100"]
    assert found["odd"] == ["acc, INT8 cache, INT8 activations", "none", "1"]


def test_card_states_an_unknown_original() -> None:
    card = render(make_report(), packed(made=manifest(None)), SourceCard())
    assert {"base_model", "base_model_relation"}.isdisjoint(metadata(card))
    assert metadata(card)["license"] == "unknown"
    assert "came from a local folder and is not named here; `lowbit.json` identifies it" in card
    assert "The license of the original, which applies to this model too, is not stated" in card


def test_the_user_states_what_is_unknown() -> None:
    said = SourceCard().stating("Qwen/Qwen3-8B", "apache-2.0")
    card = render(make_report(), packed(made=manifest(None)), said)
    found = metadata(card)
    assert (found["base_model"], found["license"]) == ("Qwen/Qwen3-8B", "apache-2.0")
    assert found["base_model_relation"] == "quantized"
    assert "[Qwen/Qwen3-8B](https://huggingface.co/Qwen/Qwen3-8B), its" in card
    assert "is not stated" not in card
    assert "local folder" not in card


def test_card_names_the_fetched_original_beside_the_stated_one() -> None:
    source = SourceCard("other", "qwen", "https://example.org/LICENSE")
    card = render(make_report(), source=source.stating("Qwen/Qwen3-0.6B-Base", "mit"))
    found = metadata(card)
    assert found["base_model"] == "Qwen/Qwen3-0.6B-Base"
    assert found["license"] == "mit"
    assert {"license_name", "license_link"}.isdisjoint(found)
    assert "- Original: Qwen/Qwen3-0.6B at c0ffee" in card


def test_card_has_the_verdict_of_the_report() -> None:
    for kl in (0.001, 0.05, 0.5):
        report = make_report(kl_mean=kl)
        verdict = judge(report)
        assert f"{verdict.title}: {verdict.reason}" in render(report)


def test_inputs_in_eight_bits_have_a_table(extras: dict[str, Any]) -> None:
    card = render(make_report(kinds=extras["kinds"], int8_inputs=extras["int8_inputs"]))
    assert "| stories | 3.360 | 0.0204 ± 0.0005 | 0.0024 ± 0.0001 more | 94.01 % |" in card
    assert "| maths | 6.590 | 0.023 ± 0.001 | 0.0009 ± 0.0004 less | 92.80 % |" in card
    assert "eight bits" not in render(make_report())


def test_a_folder_of_another_tool_names_no_original() -> None:
    opened = replace(packed(), manifest=None)
    card = render(make_report(), opened, SourceCard())
    assert "The original is not named in these files." in card
    assert "lowbit.json" not in card


def test_a_license_of_its_own() -> None:
    source = SourceCard("other", "qwen", "https://example.org/LICENSE", (), "any-to-any")
    found = metadata(render(make_report(), source=source))
    assert (found["license"], found["license_name"]) == ("other", "qwen")
    assert found["license_link"] == "https://example.org/LICENSE"
    assert found["pipeline_tag"] == "text-generation"  # there is no vision tower
    seeing = render(make_report(), packed(vision=True), source)
    assert metadata(seeing)["pipeline_tag"] == "any-to-any"
    seeing = render(make_report(), packed(vision=True))
    assert metadata(seeing)["pipeline_tag"] == "image-text-to-text"
    assert "The vision tower is not quantized: 4 B in BF16." in seeing


def test_commands() -> None:
    report = replace(make_report(), command="lowbit-convert Qwen/Qwen3-0.6B m")
    card = render(report, target="me/m")
    for line in (
        'lowbit-run me/m "Once upon a time"',
        "vllm serve me/m",
        'model = AutoModelForCausalLM.from_pretrained("me/m", dtype="auto")',
        "lowbit-convert Qwen/Qwen3-0.6B m",
        "hf download me/m --local-dir m",
        "lowbit-convert verify m",
    ):
        assert f"\n{line}" in card
    assert "FOLDER" not in card
    assert "lowbit-convert verify FOLDER" in render(report)


def test_nothing_measured() -> None:
    card = render(None)
    assert "Not measured." in card
    assert "model-index" not in metadata(card)
    assert table(card) == []


def test_only_weights_compared() -> None:
    card = render(make_report(measured=False))
    assert "Only the weights were compared" in card
    assert "model-index" not in metadata(card)
    assert [row[0] for row in table(card)] == ["linear", "q_proj", "v_proj", "up_proj", "lm_head"]


def test_card_warns_of_several_schemes() -> None:
    report = make_report()
    assert "garbage" in render(report)
    one = packed({UP: Scheme(8, 128), HEAD: Scheme(8, 128)})
    assert "garbage" not in render(report, one)
    assert "int8" in metadata(render(report, one))["tags"]
    assert "garbage" in render(report, packed({UP: Scheme(8, 64), HEAD: Scheme(8, 128)}))


@pytest.mark.parametrize(
    ("opened", "reason"),
    [
        (packed({UP: Scheme(3, 128)}), "3-bit weights:  model.layers.0.mlp.up_proj"),
        (packed({UP: Scheme(4, 256)}), "group size 256"),
        (packed(shape=(96, 128)), "N = 96 is not a multiple of 64"),
    ],
)
def test_card_names_schemes_that_vllm_does_not_load(opened: PackedCheckpoint, reason: str) -> None:
    card = render(make_report(), opened)
    assert "vllm serve" not in card
    assert "lowbit-run FOLDER" in card  # which serves 3 bits, too
    assert f"vLLM does not load this file:\n\n- {reason}" in card


def test_card_names_schemes_that_lowbit_run_does_not_serve() -> None:
    card = render(make_report(), packed({UP: Scheme(5, 128)}))
    assert "lowbit-run FOLDER" not in card
    assert "`lowbit-run` does not serve this file: 5-bit weights" in card


def test_a_packed_head_needs_a_new_vllm() -> None:
    assert "vLLM loads it from release 0.20 on (quantized lm_head)." in render(make_report())
    assert "release" not in render(make_report(), packed({UP: Scheme(4, 128)}))


@pytest.mark.parametrize(
    ("config", "vision", "command", "release"),
    [
        ({"model_type": "qwen3"}, False, "FOLDER", "0.20"),
        ({"model_type": "qwen3_5", "text_config": {}}, True, "FOLDER", "0.20"),
        (
            {"model_type": "qwen3_5_moe", "text_config": {}},
            False,
            "FOLDER --language-model-only",
            "0.20",
        ),
        ({"model_type": "qwen3_5_text"}, False, "FOLDER", "0.27"),
    ],
)
def test_vllm_is_told_that_there_is_no_vision_tower(
    config: dict[str, Any], vision: bool, command: str, release: str
) -> None:
    opened = packed(made=manifest(None), vision=vision)
    opened = replace(opened, checkpoint=replace(opened.checkpoint, config=config))
    card = render(make_report(), opened)
    assert f"vllm serve {command}\n```\n\nvLLM loads it from release {release} on (" in card


@pytest.mark.parametrize("method", ["gptq", "gptq+rotate", "gptq+rotate+autoround"])
def test_adapters_are_said_not_to_fit_a_rotated_file(method: str) -> None:
    made = manifest(None, **Recipe(method=Method.parse(method)).to_json())
    assert ("adapters" in render(make_report(), packed(made=made))) == ("rotate" in method)


def test_a_recipe_of_another_release_keeps_the_warning_of_adapters() -> None:
    content = Recipe(method=Method.parse("gptq+rotate")).to_json()
    for change in ({"method": "gptq+rotate+polish"}, {"invented": 1}):
        made = manifest(None, **{**content, **change})
        assert "adapters" in render(make_report(), packed(made=made))


def test_patterns_of_a_recipe_are_shown_as_they_are() -> None:
    pattern = "*.self_attn.[qkv]_proj=8g128"
    card = render(None, packed(made=manifest(None, recipe="int4", overrides=[pattern, "a=4"])))
    assert f"- Overrides: `{pattern}, a=4`" in card.splitlines()


def test_hostile_names() -> None:
    name = 'x`|\n---\nlicense: stolen\n```\n<script>alert(1)</script>"'
    report = replace(make_report((linear(name),), text_name=name), command=name)
    source = SourceCard(license_name=name, license_link=name)
    card = render(report, packed(made=manifest(name, recipe=name)), source, None, name, name)
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"].startswith("x`|")
    assert metadata(card)["license"] == "unknown"
    assert "<script>" not in body.partition("## Use")[0]
    assert body.count("```") % 2 == 0
    rows = [line for line in card.splitlines() if line.startswith("|")]
    assert all(line.count("|") in (4, 6) for line in rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n# Model\n", SourceCard("apache-2.0")),
        ("---\r\ntags: [x]\r\nlicense: 'mit'\r\n---\r\n", SourceCard("mit")),
        ("---\nlanguage: en\n---\n", SourceCard(languages=("en",))),
        (
            "---\nlanguage: [en, 3, null, no, zh-TW, a b, '']\n---\n",
            SourceCard(languages=("en", "no", "zh-TW")),
        ),
        (
            "---\nlanguage: [multilingual, code, [en], {en: de}]\n---\n",
            SourceCard(languages=("multilingual", "code")),
        ),
        ("---\nlicense: null\nlicense_name: ~\n---\n", SourceCard()),
        (
            "---\nlicense: !!timestamp x\nlanguage: !!bool en\n---\n",
            SourceCard("x", languages=("en",)),
        ),
        ('---\nlicense: "\\UFFFFFFFF"\n---\n', SourceCard()),
        (f"---\nlicense: mit\nx: {'[' * 5_000}\n---\n", SourceCard()),
        (f"---\nlicense: mit\nx: {'x' * 70_000}\n---\n", SourceCard()),
        (
            "---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\n---\n",
            SourceCard("other", "qwen", "LICENSE"),
        ),
        ("---\npipeline_tag: text-generation\n---\n", SourceCard(pipeline_tag="text-generation")),
        ("---\nlicense:\n- mit\n---\n", SourceCard()),
        ("---\ntags: [x]\n---\nlicense: mit\n", SourceCard()),
        ("---\nlicense: [\n---\n", SourceCard()),
        ("---\nlicense: 2026-13-45\n---\n", SourceCard("2026-13-45")),
        ("---\n- a list\n---\n", SourceCard()),
        ("---\nlicense: !!python/object:os.system x\n---\n", SourceCard("x")),
        ("license: mit\n", SourceCard()),
        ("", SourceCard()),
    ],
)
def test_read_source_card(tmp_path: Path, text: str, expected: SourceCard) -> None:
    path = tmp_path / "README.md"
    path.write_text(text, newline="")
    assert read_source_card(path) == expected


def test_no_source_card(tmp_path: Path) -> None:
    assert read_source_card(tmp_path / "README.md") == SourceCard()


@given(st.text(st.sampled_from("---\nab:[]{},&*!|>'\"\\%@`#?~ \t0xU<=\x00\u2028é"), max_size=60))
def test_any_front_matter_is_read_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "README.md"
    path.write_bytes(f"---\n{text}\nlicense: mit\n---\n".encode("utf-8", "surrogatepass"))
    assert read_source_card(path).license in ("mit", None)


def test_a_card_that_is_a_link_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("---\nlicense: mit\n---\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="symbolic link out of its folder"):
        read_source_card(tmp_path / "folder" / "README.md")


def test_a_cut_vocabulary_is_told(tmp_path: Path) -> None:
    lengths = (
        TextLength("prose | x", 1000, 250, 300, 1.25, 1.5),
        TextLength("code", 1000, 400, 401, None, None),
    )
    kept = KeptVocabulary(
        *("0.1.0", "Qwen/Qwen3-0.6B", "c0ffee", "", 151936, 151669, 65536),
        *("own.txt", "", 1000, 0.987, 0.95, lengths, tuple(range(65536))),
    )
    (tmp_path / "kept_vocabulary.json").write_bytes(kept.to_bytes())
    opened = packed(made=manifest(None))
    assert "## Vocabulary" not in render(None, opened)
    card = render(None, replace(opened, checkpoint=replace(opened.checkpoint, folder=tmp_path)))
    assert "65,536 of 151,669 tokens of Qwen/Qwen3-0.6B are\nkept" in card
    assert "own.txt (98.70 % of its tokens)" in card
    rows = [line for line in card.splitlines() if line.startswith(("| prose", "| code"))]
    assert rows[0].endswith("| 0.2500 | 0.3000 | 1.2500 | 1.5000 |")
    assert rows[0].count("|") == 6 + rows[0].count("\\|")
    assert rows[1] == f"| code | 0.4000 | 0.4010 | {MISSING} | {MISSING} |"
    (tmp_path / "kept_vocabulary.json").write_bytes(replace(kept, repo=None).to_bytes())
    card = render(None, replace(opened, checkpoint=replace(opened.checkpoint, folder=tmp_path)))
    assert "151,669 tokens are\nkept" in card
    assert card.index("## Vocabulary") < card.index("## Quality")
