"""`python -m lowbit.runtime` is `lowbit-run`."""

from lowbit.runtime.cli import main

main(prog_name="lowbit-run")
