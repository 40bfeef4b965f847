"""Options that a report proposes, by those the file was made with."""

from collections.abc import Callable
from dataclasses import replace
from io import StringIO

import pytest

from lowbit.convert.measure.record import QualityReport
from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.report.html import render_html
from lowbit.convert.report.terminal import render_terminal
from lowbit.convert.report.verdict import judge, next_steps
from lowbit.formats.shell.tables import Screen

MakeReport = Callable[..., QualityReport]
MakeRow = Callable[..., WeightQuality]

BEST = "lowbit-convert SRC a --method gptq+rotate+autoround"


@pytest.mark.parametrize(
    ("model_type", "command", "first"),
    [
        ("qwen3", "lowbit-convert SRC a", "--method gptq+rotate (same"),
        ("qwen3", "lowbit-convert SRC a --method absmax", "--method gptq+rotate (same"),
        ("qwen3_5", "lowbit-convert SRC a", "--method gptq (same"),
        ("qwen3_5", "lowbit-convert SRC a --method weighted", "--method gptq (same"),
        ("qwen3", "lowbit-convert SRC a --method gptq", "--method gptq+rotate (same"),
        ("qwen3_5", "lowbit-convert SRC a --method gptq", "--method gptq+autoround (same"),
        ("qwen3", "lowbit-convert SRC a --method gptq+rotate", "--target-bpw 4.86 (same"),
        ("qwen3", "lowbit-convert SRC a --method nonsense", "--target-bpw 4.86 (same"),
        ("qwen3", f"{BEST} --bits a=4", "--recipe int8 ("),
        ("qwen3", f"{BEST} --bits a=4 --recipe int3", "--recipe int4 ("),
        ("qwen3", f"{BEST} --bits a=4 --recipe int2", "--recipe int3 ("),
    ],
)
def test_the_first_step_depends_on_what_was_used(
    make_report: MakeReport, model_type: str, command: str, first: str
) -> None:
    steps = next_steps(replace(make_report(), model_type=model_type, command=command))
    assert steps[0].startswith(first)
    assert "--group-size 64 (up to 0.25 bits per weight more)" in steps
    assert steps[-1].startswith("--target-bpw 5.9 (")


def test_experts_are_not_promised_what_was_measured_without(make_report: MakeReport) -> None:
    """Experts of several schemes load nowhere else."""
    made = replace(make_report(), command="lowbit-convert SRC a --method gptq")
    for model_type, told in (("qwen3", True), ("qwen3_moe", False), ("qwen3_5_moe", False)):
        steps = next_steps(replace(made, model_type=model_type))
        assert any("--target-bpw 4.86 (same size" in step for step in steps) == told


def test_smaller_groups_end(make_report: MakeReport) -> None:
    made = replace(make_report(), command="lowbit-convert SRC a --group-size 64")
    assert any(step.startswith("--group-size 32") for step in next_steps(made))
    made = replace(made, command="lowbit-convert SRC a --group-size 32")
    assert not any(step.startswith("--group-size") for step in next_steps(made))


def test_eight_bits_gain_from_smaller_groups_only(
    make_report: MakeReport, make_row: MakeRow
) -> None:
    rows = (make_row("model.layers.0.mlp.up_proj", 8),)
    made = replace(make_report(rows), command="lowbit-convert SRC a --recipe int8")
    assert [step.split(" (")[0] for step in next_steps(made)] == ["--group-size 64"]


@pytest.mark.parametrize("command", [None, "lowbit-convert 'unfinished"])
def test_files_of_others_have_none(make_report: MakeReport, command: str | None) -> None:
    assert next_steps(replace(make_report(), command=command)) == ()


def test_only_a_file_that_loses_too_much_has_steps(make_report: MakeReport) -> None:
    good = make_report(kl_mean=0.001, kl_error=None, top1_agreement=0.99, kl_p99=0.01)
    assert (judge(good).level, judge(good).next_steps) == ("good", ())
    bad = make_report(kl_mean=0.6, kl_p99=4.0)
    assert judge(bad).level == "bad"
    steps = judge(bad).next_steps
    assert steps == next_steps(bad) != ()
    said = StringIO()
    render_terminal(Screen(said), bad)
    assert all(step in said.getvalue() for step in steps)
    assert "To lose less, convert again with:" in render_html(bad, None, "m")
    assert "To lose less" not in render_html(good, None, "m")
