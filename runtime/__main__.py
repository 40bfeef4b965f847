"""`lowbit-run`, and `python -m lowbit.runtime`."""

from typing import NoReturn

from lowbit.formats.shell.entry import run


def main() -> NoReturn:
    """Run the command."""
    run("lowbit.runtime.cli.main", "lowbit-run")


if __name__ == "__main__":
    main()
