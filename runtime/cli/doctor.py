"""`lowbit-run doctor`."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import device_choice, folders, json_option, model_name
from lowbit.formats.shell.output import print_json
from lowbit.runtime.cli.options import named_device

if TYPE_CHECKING:
    from lowbit.runtime.lab.expected import Speed

LACKING = 1  # exit code


@click.command(
    short_help="Show what works here and how fast.",
    epilog="""\b
    Examples:
      lowbit-run doctor
      lowbit-run doctor Qwen/Qwen3-8B --hub
      lowbit-run doctor qwen3-8b-int4 --drafter qwen3-8b-dflash-int4
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
@click.option("--hub", "ask_hub", is_flag=True, help="Ask whether the Hub can be reached, too.")
@json_option
@reported
def doctor(
    *, name: str | None, device: str | None, drafter: str | None, ask_hub: bool, as_json: bool
) -> None:
    """Show what works on this machine, what is missing, and the speed to expect of MODEL.

    MODEL is a folder, a config.json or a Hub id; without it the usual sizes are shown. The speed
    comes from the bytes that a token reads and from the memory's bandwidth, measured now. The exit
    code is 1 where something is missing that is needed.
    """
    if drafter is not None and name is None:
        raise click.UsageError("--drafter needs MODEL, which it drafts for.")
    from lowbit.runtime.lab.checks import look
    from lowbit.runtime.lab.tables import show_findings, show_speed

    findings = look(device, ask_hub)
    if not as_json:
        show_findings(findings)
    missing = {each.what for each in findings if each.state == "missing"}
    speed = None if "PyTorch" in missing else _speed(name, device, drafter)
    if as_json:
        found = [asdict(each) for each in findings]
        print_json({"ok": not missing, "findings": found, "speed": speed and asdict(speed)})
    elif speed is not None:
        show_speed(speed)
    if missing:
        raise click.exceptions.Exit(LACKING)


def _speed(name: str | None, device: str | None, drafter: str | None) -> "Speed | None":
    """The speed to expect; None on a GPU that was asked for and is not there."""
    import torch

    from lowbit.runtime.lab.expected import measured_speed

    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        return None
    return measured_speed(name, device or ("cuda" if there else "cpu"), drafter)
