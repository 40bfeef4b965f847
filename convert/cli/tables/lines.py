"""Lines of a result, beside its tables."""

from lowbit.formats.shell.tables import results, styled


def ok(text: str) -> None:
    """Print a line about something that succeeded."""
    results().print(styled(("✓", "bold green"), f" {text}"))


def warn(text: str) -> None:
    """Print a line to look at."""
    results().print(styled(("!", "yellow"), f" {text}"))


def aside(text: str) -> None:
    """Print a line that matters less than the others."""
    results().print(styled((text, "dim")))
