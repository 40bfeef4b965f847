"""Results of a search for launches, as tables on stdout and as an object."""

from dataclasses import asdict
from typing import Any

from lowbit.formats.shell.tables import plain_table, results
from lowbit.runtime.kernels.launch.tuned import line_of
from lowbit.runtime.lab.tuning.search import Choice
from lowbit.runtime.lab.tuning.tune import StepTimes, Tuning


def show_tuning(name: str, tuning: Tuning) -> None:
    """A row for each linear and number of tokens, then one for each step."""
    title = f"{name} on {tuning.card.name}, steps of {tuning.layers} layers"
    table = plain_table(
        title, ("linear", "launch"), ("tokens", "tried", "before", "after", "a call gains")
    )
    for each in tuning.choices:
        launch = "as before" if each.after == each.before else line_of(each.after)
        times = f"{each.before_us:.1f} us", f"{each.after_us:.1f} us", f"{each.call_us:.2f} us"
        table.add_row(each.linear.name, launch, str(each.tokens), str(each.tried), *times)
    steps = plain_table(
        f"steps of all {tuning.whole_layers} layers, estimated",
        ("tokens",),
        ("before", "after", "gain"),
    )
    for step in tuning.steps:
        rates = [f"{_rate(step, us):,.0f} tok/s" for us in _whole(step)]
        gain = step.whole_before_us / step.whole_after_us - 1
        steps.add_row(str(step.tokens), *rates, f"{gain:+.1%}")
    console = results()
    console.print(table)
    console.print(steps)
    if tuning.path is not None:
        console.print(f"kept in {tuning.path}, which models on this GPU load with from now on")


def content_of(tuning: Tuning) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        "card": asdict(tuning.card),
        "layers": tuning.layers,
        "whole_layers": tuning.whole_layers,
        "choices": [_choice(each) for each in tuning.choices],
        "lines": tuning.lines,
        "steps": [
            asdict(step)
            | dict(
                zip(
                    ("tokens_per_s_before", "tokens_per_s_after"),
                    (_rate(step, us) for us in _whole(step)),
                    strict=True,
                )
            )
            for step in tuning.steps
        ],
        "seconds": tuning.seconds,
        "compile_s": tuning.compile_s,
        "complete": tuning.complete,
        "path": None if tuning.path is None else str(tuning.path),
    }


def _choice(choice: Choice) -> dict[str, Any]:
    linear = choice.linear
    bits, tiles, steps, paired = linear.size
    return {
        "linear": linear.name,
        "bits": bits,
        "tiles": tiles,
        "steps": steps,
        "paired": paired,
        "tokens": choice.tokens,
        "calls": linear.calls,
        "tried": choice.tried,
        "before": line_of(choice.before),
        "after": line_of(choice.after),
        "before_us": choice.before_us,
        "after_us": choice.after_us,
        "call_us": choice.call_us,
    }


def _whole(step: StepTimes) -> tuple[float, float]:
    return step.whole_before_us, step.whole_after_us


def _rate(step: StepTimes, us: float) -> float:
    return step.tokens * 1e6 / us
