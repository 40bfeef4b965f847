"""Rows, pages and slots: what sequences are given while they run, and leave to later ones."""

from lowbit.runtime.engine.cuts import prompt_cuts
from lowbit.runtime.engine.prefix import Hit, PrefixCache, new_prefix, shared_pages
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.state.pool import Pool
from lowbit.runtime.state.step import NO_SLOT


class Room:
    """Everything that sequences share.

    Attributes:
        pages: of keys and values.
        rows: of block tables and sampler; the slot of that number is for the recurrent state.
        snapshots: slots with recurrent states that are kept.
        prefixes: tokens of ended sequences, for prompts that begin with them.
    """

    def __init__(self, runner: Runner) -> None:
        """All of it is free."""
        state, rows = runner.state, runner.tables.shape[0]
        self._runner = runner
        self.pages, self.rows = Pool(state.pages.count), Pool(rows)
        self.snapshots = Pool(rows + runner.snapshots, first=rows)
        self.prefixes = PrefixCache(self.pages, self.snapshots, state.recurrent)
        self._changes = 0  # of what is kept or taken back: only then is it worth trying again
        self._refused: tuple[Sequence, int | None, int] | None = None  # with the changes by then
        runner.batch = []
        for row in range(1, rows):
            runner.sampler.clear_row(row)

    def open(self, sequence: Sequence, scored: int | None = None) -> bool:
        """Give a sequence a row, its pages and what the cache holds of its prompt.

        Args:
            sequence: waiting.
            scored: first token whose logits are wanted; None to generate after the last.

        Returns:
            False where no row or too few pages are free.
        """
        attempt = sequence, scored, self._changes
        if not self.rows.free or attempt == self._refused:
            return False
        prompt = sequence.request.prompt
        cuts = prompt_cuts(prompt, sequence.request.message_ends)
        if scored is None:
            hit = self.prefixes.find(prompt, len(prompt) - 1, cuts)
        else:
            hit = self.prefixes.find(prompt, scored)
            cuts.append(scored)
        shared, partial = shared_pages(hit) if hit else ([], None)
        self.pages.share(shared)  # so that making room does not free them
        if partial is not None:
            self.pages.share([partial])
        needed = sequence.page_count - len(shared)
        if not self.prefixes.make_room(needed):
            self.pages.drop(shared if partial is None else [*shared, partial])
            self._refused = attempt
            return False
        fresh = self.pages.take(needed)
        if partial is not None:
            self._runner.copy_page(partial, fresh[0])
            self.pages.drop([partial])
        sequence.pages = [*shared, *fresh]
        [sequence.row] = self.rows.take(1)
        sequence.slot = sequence.row
        sequence.length = sequence.reused = sequence.headed = hit.length if hit else 0
        sequence.fresh = len(prompt)
        if hit is not None:
            if hit.length > hit.prefix.fresh:
                sequence.fresh = hit.prefix.fresh
            taken = [c for c in hit.prefix.cuts if c <= hit.length]
            cuts = [*taken, hit.length, *(c for c in cuts if c > hit.length)]
        sequence.cuts = sorted({*cuts} - {0})
        sequence.phase = "prompt"
        self._runner.open(sequence, _snapshot(hit))
        return True

    def take_snapshot(self, sequence: Sequence) -> None:
        """Keep the present recurrent state of a sequence, where there is one and room for it."""
        known = self._runner.state.recurrent and sequence.slot != NO_SLOT
        slot = self.prefixes.take_snapshot() if known else None
        if slot is not None:
            self._runner.state.slots.copy(sequence.slot, slot)
            sequence.snapshots[sequence.length] = slot

    def keep(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens of a sequence for prompts that begin with them."""
        if length == 0:
            return
        self._changes += 1
        decoded = len(sequence.request.prompt)
        prefix = new_prefix(
            sequence.ids[:length], sequence.pages, sequence.cuts, decoded, sequence.fresh
        )
        prefix.snapshots = {at: slot for at, slot in sequence.snapshots.items() if at <= length}
        for at in prefix.snapshots:
            del sequence.snapshots[at]
        self.prefixes.insert(prefix)

    def forget(self) -> None:
        """Keep nothing any more."""
        self._changes += 1
        self.prefixes.clear()

    def close(self, sequence: Sequence) -> None:
        """Take everything back from a sequence.

        Steps that are under way still write to its row and pages; whoever gets these next writes
        later.
        """
        self._changes += 1
        self.snapshots.drop(sequence.snapshots.values())
        self.pages.drop(sequence.pages)
        self.rows.drop([sequence.row])
        self._runner.close(sequence)


def _snapshot(hit: Hit | None) -> int | None:
    """Slot with the recurrent state of what a prompt takes over."""
    return hit.prefix.snapshots.get(hit.length) if hit else None
