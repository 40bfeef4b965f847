"""`lowbit-convert`: the group of its commands."""

import click

from lowbit.convert.commands.compare import compare
from lowbit.convert.commands.diff import diff
from lowbit.convert.commands.export import export
from lowbit.convert.commands.inspect import inspect
from lowbit.convert.commands.plan import plan
from lowbit.convert.commands.push import push
from lowbit.convert.commands.quantize import quantize
from lowbit.convert.commands.report import report
from lowbit.convert.commands.sensitivity import sensitivity
from lowbit.convert.commands.verify import verify
from lowbit.formats.shell.commands import Commands, epilog


@click.group(
    cls=Commands,
    default="quantize",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=epilog("lowbit-convert", "SRC OUT", "quantize"),
)
@click.version_option(package_name="lowbit")
def main() -> None:
    """Turn a Qwen3, Qwen3.5, Qwen2.5 or Llama 3 checkpoint into packed INT4 or INT8.

    Measures, publishes and exports the result too. SRC is a folder or a Hub id.
    """


for command in (quantize, plan, inspect, verify, report, compare, diff, sensitivity, push, export):
    main.add_command(command)
