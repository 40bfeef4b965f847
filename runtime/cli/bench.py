"""`lowbit-run bench`."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import folders, json_option, model_name, with_options
from lowbit.formats.shell.output import print_json
from lowbit.formats.shell.sections import Sectioned
from lowbit.runtime.cli.bench_server import (
    check_without_server,
    measure_server,
    server_options,
)
from lowbit.runtime.cli.options import (
    SECTIONS,
    count_option,
    load_text_model,
    machine_options,
    quantize_options,
    speculate_options,
    with_load_options,
)
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.lab.bench_settings import BenchSettings

MOST_RUNS = 10_000
DEFAULTS = BenchSettings()
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
)


@click.command(
    cls=Sectioned,
    sections=SECTIONS,
    short_help="Measure speed and memory, or a server.",
    epilog="""\b
    Examples:
      lowbit-run bench qwen3-8b-int4
      lowbit-run bench qwen3-8b-int4 --prompt-tokens 8000 --speculate ngram
      lowbit-run bench qwen3-8b-int4 --speculate ngram --prompts own.jsonl
      lowbit-run bench Qwen/Qwen3-8B --quantize int4 --group-size 64 --json
      lowbit-run bench --url localhost:8000 --clients 1,8,64
      lowbit-run bench --url localhost:8000 --rate 4,8 --first-token-limit 1
    """,
)
@click.argument(
    "name", metavar="[MODEL]", required=False, callback=model_name, shell_complete=folders
)
@server_options
@machine_options
@quantize_options
@speculate_options
@measure_options
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --speculate: measure the answers to the lines of FILE, which are those of "
    "generate --prompts, one at a time. Texts of `stop` end none.",
)
@json_option
@reported
@with_load_options
def bench(
    *,
    name: str | None,
    options: LoadOptions,
    prompt_tokens: int,
    new_tokens: int,
    runs: int,
    sampled: bool,
    prompts: Path | None,
    as_json: bool,
    **server: Any,
) -> None:
    """Measure load time, time to the first token, decode speed, memory and share of the roofline.

    Without --speculate no token is drafted. With it, runs take turns with runs without, and the
    factor between the two is shown. Prompts are arbitrary tokens, so real text has more or fewer
    drafts accepted; --prompts takes yours, and shows a row for each.

    With --url, measure a running server instead: tokens and requests per second, and percentiles
    of the times to the first token, between tokens and to the end, under each load.
    """
    settings = BenchSettings(prompt_tokens, new_tokens, runs, sampled)
    if prompts is not None:
        from lowbit.runtime.cli.bench_prompts import check_prompts, measure_prompts

        check_prompts(options, server["url"])
    if server["url"] is not None:
        measure_server(name, options, settings, server, as_json)
        return
    if name is None:
        raise click.UsageError("Missing argument 'MODEL' (or give --url).")
    check_without_server(server)
    if prompts is not None:
        failed = measure_prompts(name, options, settings, prompts, as_json)
        click.get_current_context().exit(1 if failed else 0)
    from lowbit.formats.architectures.footprint import DEFAULT_CONTEXT
    from lowbit.runtime.lab.bench import bench as measure
    from lowbit.runtime.lab.facts import measurement_facts
    from lowbit.runtime.lab.tables import show_bench

    options = replace(options, speculate=options.speculate or "off")
    # Beyond the default the context grows with the run, or is refused before weights are read.
    needed = settings.tokens if settings.tokens > DEFAULT_CONTEXT else None
    model = load_text_model(name, replace(options, context=options.context or needed))
    result = measure(model, settings)
    if as_json:
        print_json({**asdict(result), **measurement_facts(options.quantize, model.device)})
    else:
        show_bench(name, result)
