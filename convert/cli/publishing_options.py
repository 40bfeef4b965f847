"""Options on publishing, and on what the card of a published model states."""

import re
from typing import TYPE_CHECKING

import click

from lowbit.convert.cli import options
from lowbit.formats.shell.options import model_name

if TYPE_CHECKING:
    from lowbit.convert.publish.upload import Statement

LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}", re.ASCII)  # as the Hub's identifiers are

private = click.option(
    "--private/--public",
    default=None,
    show_default="as the account is set",
    help="Who sees a new repository.",
)


def parse_hub_id(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    """A repository on the Hub, `owner/name`."""
    if text is None or ctx.resilient_parsing:
        return text
    from lowbit.formats.hub.ids import HUB_ID

    named = model_name(ctx, param, text)
    if named is None or not HUB_ID.fullmatch(named):
        raise click.BadParameter(f"{text!r} is not of the form OWNER/NAME.")
    return named


def parse_license(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    """An identifier of a license, `apache-2.0`."""
    if text is not None and not LICENSE.fullmatch(text):
        raise click.BadParameter(f"{text!r} is not an identifier like apache-2.0 or mit.")
    return text


def make_statement(base_model: str | None, license: str | None) -> "Statement":
    """Statement made by the options."""
    from lowbit.convert.publish.upload import Statement

    return Statement(base_model, license)


# They state in the card what neither lowbit.json nor the original's card says.
statement = options.gathered(
    "stated",
    make_statement,
    click.option(
        "--base-model",
        callback=parse_hub_id,
        metavar="OWNER/NAME",
        show_default="where it was fetched from",
        help="The original on the Hub, for the card.",
    ),
    click.option(
        "--license",
        callback=parse_license,
        metavar="ID",
        show_default="its card's, else unknown",
        help="License of the original, for the card, such as apache-2.0.",
    ),
)
