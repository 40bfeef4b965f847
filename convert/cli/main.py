"""`lowbit-convert`: the group of its commands."""

import click

from lowbit.convert.cli.calib_text import calib_text
from lowbit.convert.cli.compare import compare
from lowbit.convert.cli.cut_vocabulary import cut_vocabulary
from lowbit.convert.cli.export import export
from lowbit.convert.cli.finetune_mtp import finetune_mtp
from lowbit.convert.cli.inspect import inspect
from lowbit.convert.cli.plan import plan
from lowbit.convert.cli.push import push
from lowbit.convert.cli.quantize import quantize
from lowbit.convert.cli.report import report
from lowbit.convert.cli.sensitivity import sensitivity
from lowbit.convert.cli.verify import verify
from lowbit.formats.shell.commands import Commands, epilog
from lowbit.formats.shell.version import version_option


@click.group(
    cls=Commands,
    default="quantize",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=epilog("lowbit-convert", "SRC OUT", "quantize"),
)
@version_option
def main() -> None:
    """Turn a Qwen3, Qwen3.5, Qwen2.5 or Llama 3 checkpoint into packed INT4 or INT8.

    Measures, publishes and exports the result too. SRC is a folder or a Hub id.
    """


for command in (
    *(quantize, plan, inspect, verify, report, compare, sensitivity, calib_text, push),
    *(export, finetune_mtp, cut_vocabulary),
):
    main.add_command(command)
