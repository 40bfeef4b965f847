"""`lowbit-run`: the group of its commands."""

import click

from lowbit.formats.shell.commands import Commands, epilog
from lowbit.formats.shell.version import version_option
from lowbit.runtime.cli.bench import bench
from lowbit.runtime.cli.chat import chat
from lowbit.runtime.cli.compile import compile_kernels
from lowbit.runtime.cli.doctor import doctor
from lowbit.runtime.cli.evaluate import evaluate
from lowbit.runtime.cli.generate import generate
from lowbit.runtime.cli.list import list_models
from lowbit.runtime.cli.serve import serve
from lowbit.runtime.cli.tune import tune

CHAT = "\n    `lowbit-run MODEL` alone begins a chat in a terminal."


@click.group(
    cls=Commands,
    default="generate",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=epilog("lowbit-run", "MODEL PROMPT", "generate", CHAT),
)
@version_option
def main() -> None:
    """Run a packed checkpoint of a Qwen3, Qwen3.5, Qwen2.5 or Llama 3 model.

    MODEL is a folder or a Hub id.
    """


for command in (
    *(generate, chat, serve, bench, evaluate),
    *(doctor, list_models, compile_kernels, tune),
):
    main.add_command(command)
