"""A training of the head for multi-token prediction on the terminal."""

from itertools import zip_longest

from lowbit.convert.pipeline.finetune import Finetuned
from lowbit.convert.report.formatting import MISSING, ORDINALS, number, percent
from lowbit.formats.shell.tables import plain_table, results, styled


def finetuned(done: Finetuned) -> None:
    """Print the drafts before and after, and what became of the folder."""
    console = results()
    title = f"drafts on {done.held_out} windows held out, learned on {done.windows}"
    table = plain_table(title, ("draft",), ("before", "after", "tokens a round", "after "))
    for name, before, after in zip_longest(ORDINALS, done.before, done.after):
        pair = (before, after)
        right = (MISSING if x is None else percent(x.agreement, 1) for x in pair)
        tokens = (MISSING if x is None else number(x.tokens_a_round, 2) for x in pair)
        table.add_row(name, *right, *tokens)
    console.print(table)
    seconds = f"{done.steps} steps in {done.seconds:.0f} s"
    if done.exchanged:
        console.print(
            styled(("✓", "bold green"), f" {done.folder} has the trained head, {seconds}")
        )
    else:
        console.print(
            styled(("!", "yellow"), f" {done.folder} is as it was: no better after {seconds}")
        )
