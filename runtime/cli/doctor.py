"""`lowbit-run doctor`."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import device_choice, finite, folders, json_option, model_name
from lowbit.formats.shell.output import print_json
from lowbit.runtime.cli.options import named_device
from lowbit.runtime.thresholds import MOST_RANKS

if TYPE_CHECKING:
    from lowbit.runtime.lab.expected import Speed
    from lowbit.runtime.lab.ranks import SharedDemand

LACKING = 1  # exit code


@click.command(
    short_help="Show what works here and how fast.",
    epilog="""\b
    Examples:
      lowbit-run doctor
      lowbit-run doctor Qwen/Qwen3-8B --hub
      lowbit-run doctor qwen3-8b-int4 --drafter qwen3-8b-dflash-int4
      lowbit-run doctor qwen3-8b-int4 --tensor-parallel 2
      lowbit-run doctor --bandwidth 936
      lowbit-run doctor qwen3-8b-int4 --json
    """,
)
@click.argument(
    "name", metavar="[MODEL]", required=False, callback=model_name, shell_complete=folders
)
@device_choice(named_device)
@click.option(
    "--drafter",
    metavar="DIR|ID",
    callback=model_name,
    shell_complete=folders,
    help="A drafter, as of --speculate dflash: check that it suits MODEL, and count its memory.",
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(2, MOST_RANKS),
    metavar="N",
    help="Show the memory of MODEL by process, where N share it, and which numbers can.",
)
@click.option(
    "--bandwidth",
    type=click.FloatRange(0, min_open=True),
    callback=finite,
    metavar="GB/S",
    help="Show the speed to expect of a GPU that is not here instead, by the bandwidth of its "
    "memory: 360 of an RTX 3060, 936 of an RTX 3090, 1008 of an RTX 4090, 1792 of an RTX 5090.",
)
@click.option("--hub", "ask_hub", is_flag=True, help="Ask whether the Hub can be reached, too.")
@json_option
@reported
def doctor(
    *,
    name: str | None,
    device: str | None,
    drafter: str | None,
    tensor_parallel: int | None,
    bandwidth: float | None,
    ask_hub: bool,
    as_json: bool,
) -> None:
    """Show what works on this machine, what is missing, and the speed to expect of MODEL.

    MODEL is a folder, a config.json or a Hub id; without it the usual sizes are shown. The speed
    comes from the bytes that a token reads and from the memory's bandwidth, measured now, or given
    of a GPU that is elsewhere. The exit code is 1 where something is missing that is needed.
    """
    if drafter is not None and name is None:
        raise click.UsageError("--drafter needs MODEL, which it drafts for.")
    if tensor_parallel is not None and name is None:
        raise click.UsageError("--tensor-parallel needs MODEL, which processes share.")
    if bandwidth is not None and (device or drafter or tensor_parallel or ask_hub):
        raise click.UsageError("--bandwidth is of a GPU elsewhere: it takes no other option.")
    from lowbit.runtime.lab.checks import look
    from lowbit.runtime.lab.tables import show_findings, show_ranks, show_speed

    findings = look(device, ask_hub) if bandwidth is None else []
    if findings and not as_json:
        show_findings(findings)
    missing = {each.what for each in findings if each.state == "missing"}
    there = "PyTorch" not in missing
    speed = _speed(name, device, drafter, bandwidth) if there else None
    shared = _shared(name, device, tensor_parallel, drafter) if there else None
    if as_json:
        content = {"ok": not missing, "findings": [asdict(each) for each in findings]}
        content |= {"speed": speed and asdict(speed), "shared": shared and asdict(shared)}
        print_json(content)
    if speed is not None and not as_json:
        show_speed(speed)
    if shared is not None and not as_json:
        show_ranks(shared)
    if missing:
        raise click.exceptions.Exit(LACKING)


def _shared(
    name: str | None, device: str | None, ranks: int | None, drafter: str | None
) -> "SharedDemand | None":
    """Memory of a model by rank; None where no number of ranks is asked about."""
    if name is None or ranks is None:
        return None
    import torch

    from lowbit.runtime.lab.ranks import shared_demand

    there = torch.cuda.is_available()
    return shared_demand(name, device or ("cuda" if there else "cpu"), ranks, drafter)


def _speed(
    name: str | None, device: str | None, drafter: str | None, bandwidth: float | None
) -> "Speed | None":
    """The speed to expect; None on a GPU that was asked for and is not there."""
    import torch

    from lowbit.runtime.lab.expected import data_sheet_speed, measured_speed

    if bandwidth is not None:
        return data_sheet_speed(name, 1e9 * bandwidth)
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        return None
    return measured_speed(name, device or ("cuda" if there else "cpu"), drafter)
