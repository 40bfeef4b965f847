"""A smaller vocabulary in the terminal."""

from lowbit.convert.report.formatting import bits, number, percent
from lowbit.convert.vocabulary.beside import CutOriginal
from lowbit.formats.kept_vocabulary import KeptVocabulary
from lowbit.formats.printable import printable
from lowbit.formats.shell.output import note
from lowbit.formats.shell.tables import plain_table, results


def vocabulary(kept: KeptVocabulary) -> None:
    """Print how much of a text is kept, and how much longer texts get."""
    console = results()
    console.print(
        f"kept: {percent(kept.coverage, 1)} of the tokens of {printable(kept.text)}; counted on "
        f"half of it, {percent(kept.held_out, 1)} of the other half"
    )
    table = plain_table("tokens a byte", ("text",), ("before", "after", "more"))
    for row in kept.lengths:
        counts = (number(row.per_byte_before, 4), number(row.per_byte_after, 4))
        table.add_row(row.text, *counts, percent(row.growth, 1))
    console.print(table)
    measured = [row for row in kept.lengths if row.bits_before is not None]
    if measured:
        table = plain_table("bits a byte, both models in FP32", ("text",), ("before", "after"))
        for row in measured:
            table.add_row(row.text, bits(row.bits_before), bits(row.bits_after))
        console.print(table)


def cut_original(cut: CutOriginal, measure: bool) -> None:
    """Print which smaller original a conversion has packed.

    Args:
        cut: the original.
        measure: True where its bits a byte were asked for; an earlier run may have left them out.
    """
    kept = cut.record
    results().print(
        f"vocabulary: {kept.rows:,} of {kept.source_tokens:,} tokens; the original so cut is "
        f"{printable(str(cut.location.folder))}, for `report`, `compare` and `verify`"
    )
    vocabulary(kept)
    if measure and all(row.bits_before is None for row in kept.lengths):
        note(
            f"bits a byte were not measured when {printable(str(cut.location.folder))} was made: "
            "remove it and OUT to measure them"
        )
