"""A command whose help shows its options in sections."""

from collections.abc import Collection, Mapping
from typing import Any

import click

OTHER = "Other options"


class Sectioned(click.Command):
    """A command with many options, which its help groups by what they are for."""

    def __init__(self, *args: Any, sections: Mapping[str, Collection[str]], **options: Any) -> None:
        """Take the names of parameters by the title of their section, in the order of the help.

        Names that a command lacks are passed over, so that commands can share sections.
        """
        super().__init__(*args, **options)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list for each section, then one of the options that are in none."""
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in (*self.sections, OTHER)}
        titles = {name: title for title, names in self.sections.items() for name in names}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Argument):  # the usage line and the text name it
                continue
            row = parameter.get_help_record(ctx)
            if row is not None:
                rows[titles.get(parameter.name or "", OTHER)].append(row)
        for title, listed in rows.items():
            if listed:
                with formatter.section(title):
                    formatter.write_dl(listed)
