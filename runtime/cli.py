"""`lowbit-run`: the group of its commands."""

import click
from click_default_group import DefaultGroup

from lowbit.runtime.commands.bench import bench
from lowbit.runtime.commands.chat import chat
from lowbit.runtime.commands.evaluate import evaluate
from lowbit.runtime.commands.generate import generate


@click.group(
    cls=DefaultGroup,
    default="generate",
    default_if_no_args=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="lowbit")
def main() -> None:
    """Run a packed checkpoint of a Qwen3, Qwen3.5, Qwen2.5 or Llama 3 model.

    MODEL is a folder or a Hub id. `lowbit-run MODEL PROMPT` is short for
    `lowbit-run generate MODEL PROMPT`; see `lowbit-run generate --help`.
    """


for command in (generate, chat, bench, evaluate):
    main.add_command(command)
