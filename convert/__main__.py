"""`lowbit-convert`, and `python -m lowbit.convert`."""

from typing import NoReturn

from lowbit.formats.shell.entry import run


def main() -> NoReturn:
    """Run the command."""
    run("lowbit.convert.cli.main", "lowbit-convert")


if __name__ == "__main__":
    main()
