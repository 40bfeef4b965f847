"""The scheduler: admits sequences, cuts prompts into chunks, gives out rows, pages and snapshots.

It touches no device: what is to change there it leaves as `Change`s for the runner.

The chunk ends of a prompt depend on its messages up to there alone, because rounding depends on the
length of a chunk: two prompts that begin with the same messages are cut at the same places inside
them, so what one of them leaves in the cache has the bytes that the other would compute.
"""

import time
from collections import Counter, deque
from collections.abc import Collection
from collections.abc import Sequence as Ids
from concurrent.futures import FIRST_COMPLETED, wait
from operator import itemgetter
from threading import Lock

from lowbit.formats.errors import LowbitError, QueueFullError
from lowbit.runtime.engine.load_options import SHORT
from lowbit.runtime.engine.packs import awaited, packable
from lowbit.runtime.engine.plan import Capacity, Change, CloseRow, OpenRow, longest_chunk
from lowbit.runtime.engine.prefix_cache import (
    MOST_PREFIXES,
    Hit,
    PrefixCache,
    new_prefix,
    prefix_keys,
    shared_pages,
)
from lowbit.runtime.engine.sequence import Finish, Sequence
from lowbit.runtime.engine.stats import Reuse
from lowbit.runtime.state.changes import SaveSnapshot
from lowbit.runtime.state.pool import Pool
from lowbit.runtime.state.step import NO_SLOT

LEAST = 64  # fewest tokens between the ends of messages that are cuts
MOST_AHEAD = 4  # images of all that wait, on which threads work
SNAPSHOT_EVERY = 2048  # tokens of a prompt, where no message ends


class Scheduler:
    """Sequences of an engine, by phase.

    Attributes:
        most_waiting: sequences beside those that run together; None for any number.
        share: rows that longer answers of one client may have; None for all of them.
        capacity: sizes of what sequences share.
        blocks: rows, pages and snapshots.
        waiting: sequences without room.
        prompts: sequences whose prompts run, in the order in which they got room.
        decoding: sequences behind their prompts.
        reuse: counts of prompts that began with a cached prefix.
    """

    def __init__(self, capacity: Capacity, most_waiting: int | None) -> None:
        """Begin without sequences; arguments as in `Scheduler`."""
        self.capacity, self.most_waiting = capacity, most_waiting
        self.share: int | None = None
        self.blocks = BlockManager(capacity)
        self.waiting: deque[Sequence] = deque()
        self.prompts: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.reuse = Reuse()
        self._arriving = Lock()  # never held for longer than it takes to count
        self._arrived: deque[Sequence] = deque()  # since the last step
        self._held_back = False  # all that wait, by their clients' shares
        self._late = False  # a prompt has been passed over for its images, which may be there now
        # A waiting sequence and the one whose prompt it awaits; None once the cache has changed
        self._behind: tuple[Sequence, Sequence] | None = None

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that have room."""
        prompts = list(self.prompts)  # before `decoding`: a step may move some there meanwhile
        return tuple(dict.fromkeys((*self.decoding, *prompts)))

    @property
    def queued(self) -> tuple[Sequence, ...]:
        """Sequences without room, those included that arrived since the last step."""
        return (*list(self._arrived), *list(self.waiting))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, from any thread, without waiting for the running step.

        Raises:
            QueueFullError: as many wait as may.
        """
        with self._arriving:
            asked = {*self.queued, *self.running}  # a step may move one from these to those
            ahead = sum(not each.cancelled for each in asked)  # the next step ends the others
            rows = self.capacity.rows
            if self.most_waiting is not None and ahead >= rows + self.most_waiting:
                raise QueueFullError(
                    f"{ahead} requests run or wait, and no more than {rows} run together",
                    hint="ask again later",
                )
            self._arrived.append(sequence)

    def admit(self) -> None:
        """Queue the sequences that have arrived, and end the cancelled ones."""
        while self._arrived:  # an interrupt here or below leaves it in both, never in neither
            if self._arrived[0] not in self.waiting:
                self.waiting.append(self._arrived[0])
            self._arrived.popleft()
            self._held_back = False
        for sequence in (*self.waiting, *self.decoding, *self.prompts):
            if sequence.cancelled:
                self.end(sequence, "cancelled")

    def next_prompt(self) -> Sequence | None:
        """Sequence whose prompt runs next, given room if there is some; None without one."""
        return self.prompts[0] if self.prompts else self.open_prompt()

    def open_prompt(self, beside: bool = False) -> Sequence | None:
        """Give the next sequence that waits room for its prompt; None if there is none.

        Args:
            beside: only if its prompt may run beside `prompts`.
        """
        self._late = False
        if not self.waiting or not self.blocks.rows.free:
            return None
        first = self._next_waiting()
        if first is None or (beside and not self._runs_beside(first)):
            return None
        scored = None if first.request.prompt_logprobs is None else 0
        try:
            opened = self.blocks.open(first, scored)
        except Exception:  # of any kind: it must end with the step, or it fails for ever
            self.prompts.append(first)
            self.waiting.remove(first)
            raise
        if not opened:
            return None
        self.prompts.append(first)
        self.reuse.count(first.reused)
        return first

    def _runs_beside(self, sequence: Sequence) -> bool:
        """True if the prompt of a sequence that waits may run beside `prompts`.

        Each step asks, and to look through the cache takes milliseconds where prompts are long.
        """
        if not packable(sequence):
            return False
        if self._behind is not None:
            waits, other = self._behind
            if waits is sequence and other in self.prompts:
                return False
        found = awaited(sequence, self.prompts, self.blocks.known)
        self._behind = None if found is None else (sequence, found)
        return found is None

    def take_up(self, sequence: Sequence | None) -> None:
        """Take a sequence out of those that wait, once its row has been opened on the device."""
        if sequence is not None and sequence in self.waiting:
            self.waiting.remove(sequence)

    def _next_waiting(self) -> Sequence | None:
        """The first sequence of the client that has the fewest rows; None if shares hold all back.

        An answer that runs is never interrupted, so a client could take every row for long.
        """
        if self._held_back:
            return None
        rows = Counter(each.request.client for each in self.running)
        found: Sequence | None = None
        for each in self.waiting:
            own = rows[each.request.client]
            if self.share is not None and own >= self.share and each.count > SHORT:
                continue
            if each.images is not None and each.images.late:
                self._late = True
                continue
            if found is None or own < rows[found.request.client]:
                found = each
            if not own:
                break
        self._held_back = found is None and not self._late
        return found

    def prepare_images(self) -> None:
        """Let other threads begin with images of those that wait, unless a cached prefix has them.

        A sequence gets no room before they have ended, so that others do not wait for them too.
        Few are under way at a time, and clients take turns: the first sequences of all come before
        the second ones. Those for whose images there is no memory get room as if they had none,
        unless there is some before their turn comes.
        """
        turns: dict[str, int] = {}  # of each client
        ranked = []
        for each in self.waiting:
            if (images := each.images) is not None:
                if not images.prepared:
                    images.prepare(self.blocks.known(each))
                turn = turns[each.request.client] = turns.get(each.request.client, 0) + 1
                ranked.append((turn, images))
        under_way = {future for _, images in ranked for future in images.waits()}
        full = False
        for _, images in sorted(ranked, key=itemgetter(0)):
            images.full = full
            if not full and len(under_way) < MOST_AHEAD:
                images.begin_ahead()
                full = images.full
                under_way.update(images.waits())

    def wait_for_images(self, seconds: float) -> bool:
        """Wait for the next image that a thread prepares; False if no prompt waits for one."""
        begun = [future for each in self.waiting if each.images for future in each.images.waits()]
        if begun:
            wait(begun, seconds, FIRST_COMPLETED)
        return bool(begun) or self._late

    def keep_prompt(self, sequence: Sequence) -> None:
        """Put the whole chunks of a finished prompt into the prefix cache."""
        self._behind = None
        self.blocks.keep(
            sequence, max((c for c in sequence.chunk_ends if c <= sequence.length), default=0)
        )

    def begin_decoding(self, sequence: Sequence) -> None:
        """Let a sequence take part in decode steps, once its first token is being chosen."""
        sequence.chosen = 1
        sequence.phase = "decoding"
        self.decoding.append(sequence)
        self.prompts.remove(sequence)

    def end(self, sequence: Sequence, why: Finish | LowbitError) -> None:
        """End a sequence in any phase; unless it failed, its tokens stay in the prefix cache."""
        phase = sequence.phase
        self._held_back, self._behind = False, None
        if sequence.images is not None:
            sequence.images.drop(len(sequence.request.prompt))
        if isinstance(why, LowbitError):
            sequence.error = why
        else:
            sequence.finish = why
        sequence.phase = "ended"  # last, since handles look without the lock
        if phase == "waiting":
            self.waiting.remove(sequence)
            return
        if sequence.error is None:
            if phase == "decoding":
                self.blocks.take_snapshot(sequence)
            self.blocks.keep(sequence, sequence.length)
        self.blocks.close(sequence)
        if sequence in self.decoding:
            self.decoding.remove(sequence)
        if sequence in self.prompts:
            self.prompts.remove(sequence)

    def lose_running(self, error: LowbitError | None) -> None:
        """End all sequences with room: a step failed or, without an error, was interrupted."""
        for sequence in self.running:
            if not sequence.ended and sequence not in self.waiting:
                sequence.lose(error)
        for sequence in self.waiting:  # the first may have been given a row
            sequence.phase, sequence.admitted_at = "waiting", None
        self.prompts.clear()
        self.decoding.clear()
        self._held_back, self._behind = False, None

    def lose_queued(self, error: LowbitError) -> None:
        """End all sequences without room."""
        for queue in (self.waiting, self._arrived):
            while queue:
                queue.popleft().lose(error)

    def take_changes(self) -> list[Change]:
        """Changes that the runner makes before the next step; each is given out once."""
        changes, self.blocks.changes = self.blocks.changes, []
        return changes

    def restart(self) -> None:
        """Free all rows, pages and snapshots, the prefix cache's too."""
        self.blocks = BlockManager(self.capacity)


class BlockManager:
    """Rows, pages and snapshots of running sequences and of the prefix cache.

    Attributes:
        pages: pool of pages.
        rows: pool of rows of block tables and sampler, each with the slot of its number.
        snapshots: pool of the numbers of snapshots.
        prefixes: prefix cache.
        changes: that the runner has not been given.
    """

    def __init__(self, capacity: Capacity) -> None:
        """Free all rows, pages and snapshots."""
        self._capacity = capacity
        self.pages, self.rows = Pool(capacity.pages), Pool(capacity.rows + 1)
        self.snapshots = Pool(capacity.snapshots, first=0)
        most = max(MOST_PREFIXES, capacity.rows)
        self.prefixes = PrefixCache(self.pages, self.snapshots, capacity.recurrent, most)
        self.changes: list[Change] = []
        self._freed = 0  # times: only then is it worth trying a refused sequence again
        self._refused: tuple[Sequence, int | None, int] | None = None  # with `_freed` by then

    def open(self, sequence: Sequence, scored: int | None = None) -> bool:
        """Give a sequence a row, pages and what the prefix cache has of its prompt.

        Args:
            scored: first token whose logits are wanted; None if only those of the last are.

        Returns:
            False if no row or too few pages are free.
        """
        attempt = sequence, scored, self._freed
        if not self.rows.free or attempt == self._refused:
            return False
        prompt = sequence.request.prompt
        hit, chunk_ends = self._find(sequence, scored)
        opening = self._take_pages(sequence, hit)
        if opening is None:
            self._refused = attempt
            return False
        [sequence.row] = self.rows.take(1)
        sequence.slot, sequence.admitted_at = sequence.row, time.perf_counter()
        sequence.length = sequence.reused = hit.length if hit else 0
        sequence.fresh = len(prompt)
        if hit is not None:
            if hit.length > hit.prefix.fresh:
                sequence.fresh = hit.prefix.fresh
            taken = [c for c in hit.prefix.chunk_ends if c <= hit.length]
            chunk_ends = [*taken, hit.length, *(c for c in chunk_ends if c > hit.length)]
        sequence.chunk_ends = sorted({*chunk_ends} - {0})
        sequence.phase = "prompt"
        self.changes.append(opening)
        return True

    def known(self, sequence: Sequence) -> int:
        """Tokens of a prompt that a prefix of the cache has."""
        scored = None if sequence.request.prompt_logprobs is None else 0
        hit, _ = self._find(sequence, scored)
        return hit.length if hit else 0

    def _find(self, sequence: Sequence, scored: int | None) -> tuple[Hit | None, list[int]]:
        """The cached prefix of a prompt, and the lengths at which the prompt is cut."""
        prompt = sequence.request.prompt
        chunk_ends = chunk_ends_of(prompt, sequence.request.message_ends, self._capacity.chunk)
        keys = prefix_keys(prompt, sequence.request)
        if scored is None:
            return self.prefixes.find(keys, len(prompt) - 1, chunk_ends), chunk_ends
        return self.prefixes.find(keys, scored), [*chunk_ends, scored]

    def _take_pages(self, sequence: Sequence, hit: Hit | None) -> OpenRow | None:
        """Give a sequence the pages shared with a prefix, and free ones; None if too few are."""
        shared, partial = shared_pages(hit) if hit else ([], None)
        used = shared if partial is None else [*shared, partial]
        self.pages.share(used)  # so that making room does not free them
        needed = sequence.page_count - len(shared)
        if not self.prefixes.make_room(needed):
            self.pages.drop(used)
            return None
        fresh = self.pages.take(needed)
        sequence.pages = [*shared, *fresh]
        snapshot = hit.prefix.snapshots.get(hit.length) if hit else None
        if partial is None:
            return OpenRow(sequence, snapshot, None)
        self.pages.drop([partial])
        return OpenRow(sequence, snapshot, (partial, fresh[0]))

    def count_chunk(self, sequence: Sequence, stop: int) -> None:
        """Count the tokens up to `stop` as sent, and take a snapshot if one is due there."""
        sequence.length = stop
        due = snapshot_due(stop, sequence.snapshots, sequence.reused, self._capacity.chunk)
        if stop in sequence.chunk_ends and due:
            self.take_snapshot(sequence)

    def take_snapshot(self, sequence: Sequence) -> None:
        """Snapshot the recurrent state of a sequence, if it is known.

        Where all snapshots belong to running sequences, it gives up its own first one.
        """
        if not self._capacity.recurrent or sequence.slot == NO_SLOT:
            return
        number = self.prefixes.take_snapshot()
        if number is None and sequence.snapshots:
            number = sequence.snapshots.pop(min(sequence.snapshots))
        if number is not None:
            self.changes.append(SaveSnapshot(sequence.slot, number))
            sequence.snapshots[sequence.length] = number

    def keep(self, sequence: Sequence, length: int) -> None:
        """Put the first `length` tokens of a sequence into the prefix cache."""
        if length == 0:
            return
        self._freed += 1
        request, pages, chunk_ends = sequence.request, sequence.pages, sequence.chunk_ends
        keys = prefix_keys(sequence.ids[:length], request)
        prefix = new_prefix(keys, pages, chunk_ends, len(request.prompt), sequence.fresh)
        prefix.snapshots = {at: number for at, number in sequence.snapshots.items() if at <= length}
        for at in prefix.snapshots:
            del sequence.snapshots[at]
        self.prefixes.insert(prefix)

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._freed += 1
        self.prefixes.clear()

    def close(self, sequence: Sequence) -> None:
        """Take row, pages and snapshots back from a sequence.

        Steps under way still write to them; the next owner's steps run later.
        """
        self._freed += 1
        self.snapshots.drop(sequence.snapshots.values())
        self.pages.drop(sequence.pages)
        self.rows.drop([sequence.row])
        self.changes.append(CloseRow(sequence.row, sequence.scores))


def chunk_ends_of(ids: Ids[int], message_ends: Collection[int], chunk: int) -> list[int]:
    """Lengths at which a prompt is cut into chunks, in ascending order.

    There is a cut after `chunk` tokens, and after every message that ends LEAST tokens or more
    behind the last message that got one. A cut that such a message follows soon is left out, see
    `longest_chunk`: a picture of a whole chunk and a few words are one chunk.

    Returns:
        Lengths up to `len(ids)`; that length itself only where it is a cut too.
    """
    chunk_ends: list[int] = []
    last = last_message = 0  # the last cut, and the last one after a message
    ends = [index + 1 for index, id in enumerate(ids) if id in message_ends] if message_ends else []
    for end in (*ends, len(ids)):
        is_message = end - last_message >= LEAST and bool(ends) and end <= ends[-1]
        most = longest_chunk(chunk) if is_message else chunk
        while end - last > most:
            last += chunk
            chunk_ends.append(last)
        if end - last == chunk or is_message:
            last = end
            chunk_ends.append(last)
        if is_message:
            last_message = end
    return chunk_ends


def snapshot_due(cut: int, snapshots: Collection[int], reused: int, chunk: int) -> bool:
    """True if a cut gets a snapshot: behind a message, or SNAPSHOT_EVERY tokens after the last.

    Args:
        cut: length of the prompt so far.
        reused: length that came from the prefix cache.
    """
    since = cut - max(snapshots, default=reused)
    return bool(since % chunk) or since >= SNAPSHOT_EVERY
