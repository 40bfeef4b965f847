"""`lowbit-run bench --prompts`: drafts behind prompts of one's own."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from lowbit.formats.sampling_ranges import SETTINGS
from lowbit.formats.shell.output import note, print_json
from lowbit.formats.shell.tables import progress_bars
from lowbit.runtime.cli.options import load_text_model
from lowbit.runtime.cli.prompts import PromptLine, note_failure, read_prompts, request_of
from lowbit.runtime.conversation.chat import AnswerSettings
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.lab.bench_settings import BenchSettings

if TYPE_CHECKING:
    from lowbit.runtime.engine.model import Model
    from lowbit.runtime.lab.bench_prompts import FailedPrompt, PromptSpeed

SEED = 0  # where a line has none, so that all runs give one answer


def check_prompts(options: LoadOptions, url: str | None) -> None:
    """Refuse options that a file of prompts needs, or takes no notice of.

    Raises:
        click.UsageError: there is one.
    """
    if url is not None:
        raise click.UsageError("--prompts and --url exclude each other.")
    if options.speculate in (None, "off"):
        raise click.UsageError("--prompts needs --speculate: it compares drafts with none.")
    source = click.get_current_context().get_parameter_source("prompt_tokens")
    if source == ParameterSource.COMMANDLINE:
        raise click.UsageError("--prompts and --prompt-tokens exclude each other.")


def measure_prompts(
    name: str, options: LoadOptions, settings: BenchSettings, path: Path, as_json: bool
) -> int:
    """Measure the answers to a file of prompts, and show the figures.

    Returns:
        Number of prompts that failed.

    Raises:
        LowbitError: the file cannot be read, or the model cannot be loaded.
    """
    from lowbit.runtime.engine.chance import ChanceWatch
    from lowbit.runtime.lab.bench import choice_of, device_name
    from lowbit.runtime.lab.bench_prompts import total
    from lowbit.runtime.lab.tables import show_prompts

    chosen = choice_of(settings)
    sampling = {key: getattr(chosen, key) for key in SETTINGS} | {"seed": SEED}
    given = AnswerSettings(sampling=sampling, max_new_tokens=settings.new_tokens)
    lines = read_prompts(path, given)
    model = load_text_model(name, options)
    speeds, failed = _measured(model, lines, settings.runs, as_json)
    whole = total(speeds) if speeds else None
    if as_json:
        _print(model, options, speeds, failed, whole)
    elif whole is not None:
        title = f"{name} on {device_name(model.device)}, --speculate {options.speculate}"
        show_prompts(title, [*speeds, whole])
    doubt = ChanceWatch(options).count(None if whole is None else whole.speculation)
    if doubt is not None:
        note(doubt)
    return len(failed)


def _measured(
    model: "Model", lines: Sequence[PromptLine], runs: int, quiet: bool
) -> "tuple[list[PromptSpeed], list[FailedPrompt]]":
    """Figures of each line; a line on stderr for each that fails."""
    from lowbit.runtime.lab.bench_prompts import FailedPrompt, PromptSpeed, bench_prompts

    asked = [(line.id, partial(request_of, model, line)) for line in lines]
    speeds: list[PromptSpeed] = []
    failed: list[FailedPrompt] = []
    with progress_bars({"prompts": "measuring"}, quiet) as progress:
        made = zip(lines, bench_prompts(model, asked, runs), strict=True)
        for count, (line, found) in enumerate(made, start=1):
            if isinstance(found, FailedPrompt):
                failed.append(found)
                note_failure(line, found.error, found.hint)
            else:
                speeds.append(found)
            progress("prompts", count, len(lines))
    return speeds, failed


def _print(
    model: "Model",
    options: LoadOptions,
    speeds: "Sequence[PromptSpeed]",
    failed: "Sequence[FailedPrompt]",
    whole: "PromptSpeed | None",
) -> None:
    from lowbit.runtime.lab.bench import device_name
    from lowbit.runtime.lab.facts import measurement_facts

    facts = {
        **measurement_facts(options.quantize, model.device),
        "prompt": "lines of a file",
        "device": device_name(model.device),
        "activations": options.activations,
        "speculate": options.speculate,
        "drafter": None if options.drafter is None else str(options.drafter),
    }
    prompts = [*map(asdict, speeds), *map(asdict, failed)]
    print_json({**facts, "prompts": prompts, "all": None if whole is None else asdict(whole)})
