"""`--config FILE.toml`: options of a command in a file, below those of the command line."""

import difflib
import os
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import click

from lowbit.formats.errors import RequestError
from lowbit.formats.files.user_file import read_user_file
from lowbit.formats.hub.ids import HUB_ID
from lowbit.formats.shell.failure import Command
from lowbit.formats.shell.options import Renamed

NEVER = ("config", "debug", "help")  # options that a file cannot set


def config_option(models: Collection[str]) -> Callable[[Command], Command]:
    """The option --config.

    Args:
        models: names of parameters that take a folder or a Hub id; a relative folder in the file
            is relative to the file.
    """

    def read(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
        if value is not None and not context.resilient_parsing:
            context.default_map = _values(context, value, _content(value), models)

    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=read,
        help="Take options from a TOML file, port = 8001 and the like, and MODEL as model. The "
        "command line and variables come first; folders are relative to FILE.",
    )


def _content(path: Path) -> dict[str, Any]:
    """The keys of a file.

    Raises:
        click.BadParameter: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(read_user_file(path, "config file").decode())
    except RequestError as error:
        raise click.BadParameter(f"{error}.") from None
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"`{path}` is no TOML: {error}.") from None


def _values(
    context: click.Context, path: Path, content: Mapping[str, Any], models: Collection[str]
) -> dict[str, Any]:
    """Values by the names of parameters, each of them checked.

    Raises:
        click.BadParameter: a key that is no option, or a value that its option does not take.
    """
    known = _parameters(context.command)
    found: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known:
            close = difflib.get_close_matches(key.replace("_", "-"), known, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else "."
            raise click.BadParameter(f"`{path}`: there is no option `{key[:80]}`{hint}")
        parameter = known[key]
        name = str(parameter.name)
        try:
            given = _plain(parameter, value)
            if name in models:
                given = _beside(path, str(given))
            parameter.process_value(context, given)
        except click.UsageError as error:
            raise click.BadParameter(f"`{path}`: `{key}`: {error.message}") from None
        if name in found:  # by its present and by its former name
            raise click.BadParameter(f"`{path}`: `{key}` is given twice.")
        found[name] = given
    return found


def _parameters(command: click.Command) -> dict[str, click.Parameter]:
    """Parameters by their keys: the long names of options, and of arguments in small letters."""
    found: dict[str, click.Parameter] = {}
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            found[(parameter.metavar or parameter.human_readable_name).lower()] = parameter
        elif parameter.name not in NEVER:
            found[parameter.opts[0].removeprefix("--")] = parameter
            if isinstance(parameter, Renamed):
                found[parameter.former.removeprefix("--")] = parameter
    return found


def _plain(parameter: click.Parameter, value: Any) -> Any:
    """A value as the command line would hold it.

    Raises:
        click.BadParameter: of a type that the option does not take.
    """
    if isinstance(parameter, click.Option) and parameter.is_flag:
        if not isinstance(value, bool):
            raise click.BadParameter("expected true or false.")
        return value
    if isinstance(parameter, click.Option) and parameter.multiple:
        each = value if isinstance(value, list) else [value]
        return tuple(_text(item) for item in each)
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise click.BadParameter("expected a text or a number.")
    return str(value)


def _beside(path: Path, name: str) -> str:
    """A model as the file names it: a folder beside the file, or a Hub id or address."""
    folder = path.parent / name
    is_id = bool(HUB_ID.fullmatch(name.partition("@")[0])) or "://" in name
    if is_id and not os.path.exists(folder):  # noqa: PTH110 - Path.exists raises for long names
        return name
    return str(folder)
