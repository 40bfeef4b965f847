"""Options that a report proposes, by those the file was made with."""

import shlex
from dataclasses import replace
from io import StringIO

import pytest

from lowbit.convert.measure.record import UsedRecipe
from lowbit.convert.report.html import render_html
from lowbit.convert.report.terminal import render_terminal
from lowbit.convert.report.verdict import judge, next_steps
from lowbit.formats.shell.tables import Screen
from tests.convert.report.samples import linear, make_report

BEST = UsedRecipe("int4", "gptq+rotate+autoround", 128, 1)


@pytest.mark.parametrize(
    ("model_type", "recipe", "first"),
    [
        ("qwen3", "rtn", "--method gptq+rotate (same"),
        ("qwen3", "absmax", "--method gptq+rotate (same"),
        ("qwen3_5", "rtn", "--method gptq (same"),
        ("qwen3_5", "weighted", "--method gptq (same"),
        ("qwen3", "gptq", "--method gptq+rotate (same"),
        ("qwen3_5", "gptq", "--method gptq+autoround (same"),
        ("qwen3", "gptq+rotate", "--target-bpw 4.86 (same"),
        ("qwen3", "nonsense", "--target-bpw 4.86 (same"),
        ("qwen3", BEST, "--recipe int8 ("),
        ("qwen3", replace(BEST, base="int3"), "--recipe int4 ("),
        ("qwen3", replace(BEST, base="int2"), "--recipe int3 ("),
    ],
)
def test_the_first_step_depends_on_what_was_used(
    model_type: str, recipe: UsedRecipe | str, first: str
) -> None:
    if isinstance(recipe, str):
        recipe = UsedRecipe("int4", recipe, 128, 0)
    steps = next_steps(replace(make_report(), model_type=model_type, recipe=recipe))
    assert steps[0].startswith(first)
    groups = "--group-size 64 (up to 0.25 bits per weight more)" in steps
    assert groups == (not recipe.overrides)
    assert steps[-1].startswith("--target-bpw 5.9 (")


def test_experts_are_not_promised_what_was_measured_without() -> None:
    """Experts of several schemes load nowhere else."""
    made = replace(make_report(), recipe=UsedRecipe("int4", "gptq", 128, 0))
    for model_type, told in (("qwen3", True), ("qwen3_moe", False), ("qwen3_5_moe", False)):
        steps = next_steps(replace(made, model_type=model_type))
        assert any("--target-bpw 4.86 (same size" in step for step in steps) == told


def test_smaller_groups_end() -> None:
    made = replace(make_report(), recipe=UsedRecipe("int4", "rtn", 64, 0))
    assert any(step.startswith("--group-size 32") for step in next_steps(made))
    made = replace(made, recipe=UsedRecipe("int4", "rtn", 32, 0))
    assert not any(step.startswith("--group-size") for step in next_steps(made))


def test_eight_bits_gain_from_smaller_groups_only() -> None:
    rows = (linear("model.layers.0.mlp.up_proj", 8),)
    made = replace(make_report(rows), recipe=UsedRecipe("int8", "rtn", 128, 0))
    assert [step.split(" (")[0] for step in next_steps(made)] == ["--group-size 64"]


def test_files_of_others_have_none() -> None:
    assert next_steps(replace(make_report(), recipe=None)) == ()


@pytest.mark.parametrize("name", ["x--bits", "--method", "a --bits b", "--recipe int8"])
def test_the_name_of_a_folder_changes_no_advice(name: str) -> None:
    plain = make_report()
    named = replace(plain, command=shlex.join(["lowbit-convert", "SRC", name]))
    assert next_steps(named) == next_steps(plain) != ()


def test_only_a_file_that_loses_too_much_has_steps() -> None:
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
