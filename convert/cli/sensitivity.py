"""`lowbit-convert sensitivity`."""

from functools import partial
from pathlib import Path

import click

from lowbit.convert.cli import options
from lowbit.convert.cli.target_options import parse_widths
from lowbit.formats.layout.scheme import GROUP_SIZES
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import AUTO, Count, json_option
from lowbit.formats.shell.output import note, print_json


def json_path(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a name that ends in .svg, which the plot gets."""
    if value is not None and value.suffix == ".svg":
        raise click.BadParameter("it names the JSON file; the plot has its name with .svg.")
    return value


@click.command(
    short_help="Tell what each precision of each layer loses.",
    epilog="""\b
    Example:
      lowbit-convert sensitivity Qwen/Qwen3-8B --out sensitivity.json
    """,
)
@options.source
@options.file_option(
    "--out",
    callback=json_path,
    show_default="in the cache alone",
    help="Write the figures to FILE as JSON, too, and the plot beside it.",
)
@options.text_option(
    "--calib", "Text to compute them on.", default="a bundled mix, apart from the evaluation text"
)
@click.option(
    "--windows",
    type=Count(),
    metavar="N",
    show_default="8; 2 to measure on a CPU",
    help="Windows of 512 tokens, spread over the text; codes are learned from 64 others, 16 "
    "on a CPU.",
)
@click.option(
    "--group-sizes",
    callback=options.list_of(GROUP_SIZES, "sizes"),
    default="32,64,128",
    show_default=True,
    metavar="LIST",
    help="Group sizes to choose from.",
)
@click.option(
    "--bits",
    callback=parse_widths,
    default="4,8",
    show_default=True,
    metavar="LIST",
    help="Bits to choose from, of 2, 3, 4 and 8; 4 is always among them.",
)
@options.method_option(
    "As of quantize: measured of calibrated methods; estimated of rtn, of experts, and on "
    "a CPU of all but small models."
)
@click.option(
    "--positive-scales", is_flag=True, help="With positive scales only, as quantize's option."
)
@options.device
@options.revision
@json_option
@reported
def sensitivity(
    source: str,
    out: Path | None,
    calib: Path | None,
    windows: int | None,
    group_sizes: tuple[int, ...],
    bits: tuple[int, ...],
    method: str,
    positive_scales: bool,
    device: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """Tell what 4 and 8 bits, or others, cost in each fused set of SRC: nats of KL divergence.

    Of a calibrated method, costs are measured: the model passes once, and once more for every set
    with that set's 4-bit weights, from its layer on. Of rtn and of experts, and on a CPU of all but
    small models, they are estimated by one pass forward and one backward. The figures are kept in
    the cache (below XDG_CACHE_HOME or ~/.cache), where --target-bpw and --target-size look for
    them; bits that are not there yet are added.
    """
    from lowbit.convert.budget.lookup import (
        Settings,
        check_file,
        find_or_estimate,
        write_file,
    )
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.tables import target as render
    from lowbit.convert.original.device import open_device
    from lowbit.convert.original.weights import open_dense
    from lowbit.convert.pipeline.estimate import method_chooser
    from lowbit.convert.plan.method import Method
    from lowbit.convert.plan.plan import make_plan
    from lowbit.convert.plan.recipe import Recipe
    from lowbit.convert.quantize.session import CalibrationRequest
    from lowbit.convert.report.sensitivity_plot import heat_map
    from lowbit.formats.files.atomic import attempt
    from lowbit.formats.hub.locate import locate

    if out is not None:
        check_file(out)
    original = open_dense(locate(source, revision).folder)
    if method == AUTO:
        headers = original.checkpoint
        choose = method_chooser(headers, open_device(device), CalibrationRequest(calib))
        recipe = Recipe(method=None)
        used = make_plan(headers.config, headers.tensors, recipe, choose=choose).method
    else:
        used = Method.parse(method)
    settings = Settings(
        calib=calib,
        windows=windows,
        groups=group_sizes,
        bits=bits,
        device=device,
        rule=used.scale_rule(positive_scales),
        method=used,
    )
    with progress_bars(quiet=as_json) as progress:
        found = find_or_estimate(original, settings, progress, None if as_json else note)
    plot = found.file.with_suffix(".svg") if out is None else out.with_suffix(".svg")
    contents = {plot: heat_map(found.sensitivities)}
    if out is not None:
        contents[out] = found.sensitivities.to_bytes()
    failures = [attempt(partial(write_file, *item)) for item in contents.items()]
    if as_json:
        print_json({**render.sensitivities_json(found), "plot": str(plot)})
    else:
        render.sensitivities(found)
        if not any(failures):
            note(f"plot: {plot}")
    for failure in (found.failure, *failures):
        if failure is not None:
            raise failure
