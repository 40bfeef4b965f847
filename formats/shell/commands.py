"""A group of commands with a default command."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class
from click_default_group import DefaultGroup

from lowbit.formats.shell.entry import INTERRUPTED, READER_LEFT, farewell, leave_broken
from lowbit.formats.shell.options import HELP, check_command
from lowbit.formats.shell.output import folded

SCRIPT = """\
%(complete_func)s() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
            dir,*) compopt -o filenames -o plusdirs ;;
            file,*) compopt -o default ;;
            plain,*) COMPREPLY+=("${line#plain,}") ;;
        esac
    done < <(
        IFS=$'\\n'
        env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" \\
            %(complete_var)s=bash_complete "$1"
    )
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


def epilog(program: str, arguments: str, command: str, beside: str = "") -> str:
    """Text below the list of commands; beside: another line of short forms."""
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    return f"""\b
    `{program} {arguments}` is short for
    `{program} {command} {arguments}`.{beside}

    \b
    Completion of commands, options and paths, for the shell's start-up file:
      bash  eval "$({variable}=bash_source {program})"
      zsh   eval "$({variable}=zsh_source {program})"
      fish  {variable}=fish_source {program} | source
    """


class _Misuse(click.UsageError):
    """A usage error with its message folded between words."""

    def __init__(self, error: click.UsageError) -> None:
        """Keep message and command."""
        prefix, message = "Error: ", error.format_message()
        if message.startswith("Got unexpected extra argument"):  # most often a prompt
            message += ". Words that belong together need quotes."
        text = folded(prefix + message, sys.stderr)
        super().__init__(text.removeprefix(prefix), error.ctx)


@contextmanager
def _interruptible() -> Iterator[None]:
    """End with 130 after an interrupt, where click would say `Aborted!` and end with 1."""
    try:
        yield
    except KeyboardInterrupt as error:
        farewell(str(error), lambda text: folded(text, sys.stderr))
        raise click.exceptions.Exit(INTERRUPTED) from None


@contextmanager
def _left_alone() -> Iterator[None]:
    """End quietly, with READER_LEFT, behind a write that nobody reads; else as `_interruptible`."""
    try:
        with _interruptible():
            yield
    except BrokenPipeError:
        if not leave_broken():
            raise
        raise click.exceptions.Exit(READER_LEFT) from None


class Commands(DefaultGroup):  # type: ignore[misc]  # the library has no types
    """A group that exits with 130 after an interrupt, and quietly if its output is not read."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the program, or complete a line of the shell."""
        use_own_scripts()
        try:
            return super().main(*args, **options)
        except BrokenPipeError:  # of completions, and of messages about an error
            if not leave_broken():
                raise
            sys.exit(READER_LEFT)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Read the command line with the exit codes of the class."""
        with _left_alone():
            found: click.Context = super().make_context(*args, **options)
            return found

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command with the exit codes of the class."""
        try:
            with _left_alone():
                return super().invoke(ctx)
        except click.UsageError as error:
            raise _Misuse(error) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first argument names, or the default one.

        Raises:
            click.UsageError: a command is mistyped.
        """
        first = args[0]
        if first not in self.commands and not ctx.resilient_parsing:
            if first == HELP and not Path(first).exists():
                self._show_help(ctx, args[1:])
            check_command(first)
        found: tuple[str | None, click.Command | None, list[str]]
        found = super().resolve_command(ctx, args)
        return found

    def _show_help(self, ctx: click.Context, names: list[str]) -> NoReturn:
        """Print what `--help` prints, of a command where one is named."""
        if names:
            if names[0] not in self.commands:
                check_command(names[0])
                raise click.UsageError(f"There is no command '{names[0]}'.", ctx)
            ctx = click.Context(self.commands[names[0]], parent=ctx, info_name=names[0])
        click.echo(ctx.get_help(), color=ctx.color)
        raise click.exceptions.Exit(0)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands and the arguments of the default command."""
        found: list[CompletionItem] = super().shell_complete(ctx, incomplete)
        command = self.commands[self.default_cmd_name]
        with command.make_context(command.name, [], ctx, resilient_parsing=True) as inner:
            if incomplete.startswith("-"):
                known = {item.value for item in found}
                more = command.shell_complete(inner, incomplete)
                return found + [item for item in more if item.value not in known]
            first = next(p for p in command.params if isinstance(p, click.Argument))
            # Folders first: click's scripts of other shells forget the words before them.
            return first.shell_complete(inner, incomplete) + found


class Bash(BashComplete):
    """Completion in bash.

    click's own script forgets the words that came before a folder, and offers folders only where
    there is no word.
    """

    source_template = SCRIPT

    def get_completion_args(self) -> tuple[list[str], str]:
        """Words before the cursor and the word at it; `--option=value` are three words in bash."""
        words, last = super().get_completion_args()
        if last != "=" and len(words) > 1 and words[-1] == "=" and words[-2].startswith("--"):
            words.pop()
        return words, last


def use_own_scripts() -> None:
    """Let click print the scripts of this module."""
    add_completion_class(Bash)
