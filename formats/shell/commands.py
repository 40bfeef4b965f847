"""A group of commands with a default command."""

from typing import Any

import click
from click.shell_completion import CompletionItem
from click_default_group import DefaultGroup

from lowbit.formats.shell.completion import use_own_scripts
from lowbit.formats.shell.entry import INTERRUPTED, READER_LEFT, farewell, leave_broken


def epilog(program: str, arguments: str, command: str) -> str:
    """Text below the list of commands.

    Args:
        program: name, `lowbit-run`.
        arguments: of the default command.
        command: name of the default command.
    """
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    return f"""\b
    `{program} {arguments}` is short for
    `{program} {command} {arguments}`.

    \b
    Completion of commands, options and paths, for the shell's start-up file:
      bash  eval "$({variable}=bash_source {program})"
      zsh   eval "$({variable}=zsh_source {program})"
      fish  {variable}=fish_source {program} | source
    """


class Commands(DefaultGroup):  # type: ignore[misc]  # the library has no types
    """A group that exits with 130 after an interrupt, and quietly if its output is not read."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the program, or complete a line of the shell."""
        use_own_scripts()
        return super().main(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command with the exit codes of the class."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            farewell(str(error))
            raise click.exceptions.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            if not leave_broken():
                raise
            raise click.exceptions.Exit(READER_LEFT) from None

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
