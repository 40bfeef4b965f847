"""`lowbit-convert`: the group of its commands."""

import click
from click_default_group import DefaultGroup

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


@click.group(
    cls=DefaultGroup,
    default="quantize",
    default_if_no_args=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="lowbit")
def main() -> None:
    """Turn a Qwen3 or Qwen3.5 checkpoint into a packed INT4/INT8 one, and say how good it is.

    `lowbit-convert SRC OUT` is short for `lowbit-convert quantize SRC OUT`.
    """


for command in (quantize, plan, inspect, verify, report, compare, diff, sensitivity, push, export):
    main.add_command(command)
