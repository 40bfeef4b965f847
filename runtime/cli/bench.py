"""`lowbit-run bench`."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lowbit.formats.layout.recipes import Base
from lowbit.formats.layout.scheme import GROUP_SIZES
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import json_option, output_file, with_options
from lowbit.formats.shell.output import note, print_json
from lowbit.formats.shell.sections import Sectioned
from lowbit.runtime.bench.settings import BenchSettings
from lowbit.runtime.cli.options import (
    SECTIONS,
    count_option,
    load_model,
    machine_options,
    model_argument,
    quantize_options,
    speculate_options,
    with_load_options,
)
from lowbit.runtime.engine.load_options import MOST_SEQUENCES, LoadOptions

if TYPE_CHECKING:
    from lowbit.runtime.bench.sweep import Sweep

MOST_DIGITS = 9  # of a number in a list
MOST_RUNS = 10_000
DEFAULTS = BenchSettings()
SWEEPS = ("contexts", "group_sizes", "batches")
DEFAULT_RECIPE: Base = "int4"  # of a sweep over group sizes

Values = tuple[int, ...]  # points of a sweep
Callback = Callable[[click.Context, click.Parameter, str | None], Values | None]


def numbers(among: tuple[int, ...] = ()) -> Callback:
    """A callback that reads whole numbers from 1 on, separated by commas, as rising values."""

    def read(
        context: click.Context, parameter: click.Parameter, value: str | None
    ) -> Values | None:
        return None if value is None else tuple(sorted({number(text) for text in value.split(",")}))

    def number(text: str) -> int:
        digits = text.strip()
        fits = digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS
        if not fits or int(digits) < 1:
            raise click.BadParameter(f"`{text}` is not a whole number from 1 on.")
        if among and int(digits) not in among:
            raise click.BadParameter(f"{text} is none of {', '.join(map(str, among))}.")
        return int(digits)

    return read


def svg_path(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a place that cannot become an SVG file, before the long work."""
    if value is not None and value.suffix.lower() != ".svg":
        raise click.BadParameter(f"`{value}` does not end in .svg.")
    return output_file(context, parameter, value)


measure_options = with_options(
    count_option(
        "--prompt-tokens",
        default=DEFAULTS.prompt_tokens,
        help="Length of the prompt.",
    ),
    count_option(
        "--new-tokens",
        "-n",
        default=DEFAULTS.new_tokens,
        help="Tokens to decode after it.",
        least=2,
    ),
    click.option(
        "--runs",
        type=click.IntRange(1, MOST_RUNS),
        metavar="N",
        default=DEFAULTS.runs,
        show_default=True,
        help="Repetitions, of which the median counts; one more warms up.",
    ),
    click.option(
        "--sampled",
        is_flag=True,
        help="Draw tokens with temperature 0.7, top-k 20 and top-p 0.95 instead of the likeliest.",
    ),
    click.option("--profile", is_flag=True, help="Show where the time of a token goes, too."),
)
sweep_options = with_options(
    click.option(
        "--contexts",
        metavar="N,N,...",
        callback=numbers(),
        help="Sweep: decode after prompts of so many tokens.",
    ),
    click.option(
        "--group-sizes",
        metavar="N,N,...",
        callback=numbers(GROUP_SIZES),
        help="Sweep: quantize a BF16 MODEL at load in groups of so many weights, by the recipe of "
        f"--quantize or by {DEFAULT_RECIPE}.",
    ),
    click.option(
        "--batches",
        metavar="N,N,...",
        callback=numbers(tuple(range(1, MOST_SEQUENCES + 1))),
        help=f"Sweep: decode so many sequences together, 1 to {MOST_SEQUENCES}, greedily.",
    ),
    click.option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE.svg",
        callback=svg_path,
        help="Draw the sweep.",
    ),
)


@click.command(
    cls=Sectioned,
    sections=SECTIONS,
    short_help="Measure speed and memory.",
    epilog="""\b
    Examples:
      lowbit-run bench qwen3-8b-int4 --profile
      lowbit-run bench qwen3-8b-int4 --contexts 128,8192 --plot speed.svg
      lowbit-run bench Qwen/Qwen3-8B --group-sizes 32,64,128 --json
    """,
)
@model_argument
@machine_options
@quantize_options
@speculate_options
@measure_options
@sweep_options
@json_option
@reported
@with_load_options
def bench(
    *,
    name: str,
    options: LoadOptions,
    contexts: Values | None,
    group_sizes: Values | None,
    batches: Values | None,
    prompt_tokens: int,
    new_tokens: int,
    runs: int,
    sampled: bool,
    profile: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure load time, time to the first token, decode speed, memory and share of the roofline.

    --contexts, --group-sizes and --batches each measure a series instead, which --plot draws.
    Without --speculate no token is drafted. With it, runs take turns with runs without, and the
    factor between the two is shown. Prompts are arbitrary tokens, so real text has more or fewer
    drafts accepted.
    """
    settings = BenchSettings(prompt_tokens, new_tokens, runs, sampled)
    options = replace(options, speculate=options.speculate or "off")
    points = zip(SWEEPS, (contexts, group_sizes, batches), strict=True)
    asked = [sweep for sweep, values in points if values is not None]
    _check_sweep(asked, plot, settings)
    if profile:
        _check_profile(asked, settings, options)
    if contexts is not None:
        sweep = _contexts(name, options, contexts, settings)
    elif group_sizes is not None:
        options = replace(options, quantize=options.quantize or DEFAULT_RECIPE)
        sweep = _group_sizes(name, options, group_sizes, settings)
    elif batches is not None:
        sweep = _batches(name, options, batches, settings)
    else:
        _bench(name, profile, as_json, options, settings)
        return
    _show(name, sweep, plot, as_json, options)


def _check_sweep(asked: list[str], plot: Path | None, settings: BenchSettings) -> None:
    """Refuse options that would have no effect together."""
    named = [f"--{sweep.replace('_', '-')}" for sweep in asked]
    if len(named) > 1:
        raise click.UsageError(f"{' and '.join(named)} are sweeps of their own; give one of them.")
    if plot is not None and not named:
        raise click.UsageError("--plot draws a sweep: give --contexts, --group-sizes or --batches.")
    if "group_sizes" in asked and _given("group_size"):
        raise click.UsageError("--group-sizes are the group sizes: no --group-size.")
    if "batches" in asked and settings.sampled:
        raise click.UsageError("--batches decodes greedily, it takes no --sampled.")
    if "contexts" in asked and _given("prompt_tokens"):
        raise click.UsageError("--contexts are the lengths of the prompts: no --prompt-tokens.")


def _check_profile(asked: list[str], settings: BenchSettings, options: LoadOptions) -> None:
    """Refuse a run that cannot be profiled."""
    if asked:
        named = f"--{asked[0].replace('_', '-')}"
        raise click.UsageError(f"--profile looks at one run, {named} makes several.")
    if settings.new_tokens < 3:
        raise click.UsageError("--profile takes at least 3 --new-tokens.")
    if options.speculate != "off":
        raise click.UsageError("--profile looks at plain steps: no --speculate.")


def _given(parameter: str) -> bool:
    """True if the command line or the environment sets the parameter."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source is not ParameterSource.DEFAULT


def _bench(
    name: str, profile: bool, as_json: bool, options: LoadOptions, settings: BenchSettings
) -> None:
    from lowbit.formats.architectures.footprint import DEFAULT_CONTEXT
    from lowbit.runtime.bench.bench import bench as measure
    from lowbit.runtime.bench.profiling import profile as record
    from lowbit.runtime.bench.render import show_profile, show_result

    # Beyond the default the context grows with the run, or is refused before weights are read.
    needed = settings.tokens if settings.tokens > DEFAULT_CONTEXT else None
    model = load_model(name, replace(options, context=options.context or needed))
    result = measure(model, settings)
    found = record(model, settings) if profile else None
    if as_json:
        shown = {} if found is None else {"profile": asdict(found)}
        print_json({**asdict(result), **_facts(options, model.device), **shown})
        return
    show_result(name, result)
    if found is not None:
        show_profile(found, result)


def _facts(options: LoadOptions, device: str) -> dict[str, Any]:
    """Fields of every measurement: recipe of the weights, kind of the prompt, and the machine."""
    from lowbit.runtime.machine.facts import machine_facts

    return {
        "quantized_at_load": options.quantize,
        "prompt": "arbitrary tokens",
        "machine": asdict(machine_facts(device)),
    }


def _show(
    name: str, sweep: "Sweep", plot: Path | None, as_json: bool, options: LoadOptions
) -> None:
    """Show a sweep, and draw it."""
    from lowbit.runtime.bench.plot import write_plot
    from lowbit.runtime.bench.render import show_sweep
    from lowbit.runtime.bench.sweep import plotted

    if as_json:
        device = "cpu" if sweep.device == "cpu" else "cuda"
        print_json({**asdict(sweep), **_facts(options, device)})
    else:
        show_sweep(name, sweep)
    if plot is not None:
        write_plot(plot, plotted(Path(name).name or name, sweep))
        note(f"written to {plot}")


def _contexts(
    name: str, options: LoadOptions, contexts: Values, settings: BenchSettings
) -> "Sweep":
    from lowbit.runtime.bench.sweep import over_contexts

    needed = replace(settings, prompt_tokens=max(contexts)).tokens
    model = load_model(name, replace(options, context=options.context or needed))
    return over_contexts(model, contexts, settings)


def _group_sizes(
    name: str, options: LoadOptions, sizes: Values, settings: BenchSettings
) -> "Sweep":
    from lowbit.formats.hub.locate import locate
    from lowbit.runtime.bench.sweep import check_group_sizes, over_group_sizes

    folder = locate(name).folder
    check_group_sizes(folder, options.quantize or DEFAULT_RECIPE, sizes)
    return over_group_sizes(
        lambda size: load_model(str(folder), replace(options, group_size=size)), sizes, settings
    )


def _batches(name: str, options: LoadOptions, batches: Values, settings: BenchSettings) -> "Sweep":
    from lowbit.runtime.bench.bench import tokens_before
    from lowbit.runtime.bench.sweep import over_batches

    most = max(batches)  # the first sequences decode while the last prompts run
    needed = settings.tokens + tokens_before(most, options.speculate != "off")
    options = replace(options, context=options.context or needed, max_sequences=most)
    return over_batches(load_model(name, options), batches, settings)
