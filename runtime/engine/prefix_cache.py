"""Prefix cache: keys, values and recurrent states of ended sequences, for later prompts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowbit.formats.page_counts import PAGE, pages_for
from lowbit.runtime.engine.request import Request
from lowbit.runtime.state.pool import Pool

BLOCK = 4096  # keys that are compared at once: they stay in a core's cache
MOST_PREFIXES = 64  # or one for each row; every prompt is compared with all of them


@dataclass(slots=True, eq=False)
class Prefix:
    """A sequence of tokens whose keys, values and recurrent states are kept."""

    keys: NDArray[np.int64]  # [T] int64, see `prefix_keys`
    pages: list[int]  # that hold them; the last page may hold more
    # Lengths at which the chunks ended that computed its keys and values
    chunk_ends: tuple[int, ...]
    decoded: int  # length from which on tokens were decoded one a step
    # Length of the part computed by chunks of prompts alone: a prompt with equal chunk ends would
    # compute the same bytes
    fresh: int
    # Numbers of snapshots, by length; empty without linear layers
    snapshots: dict[int, int] = field(default_factory=dict)
    used: int = 0  # time of the last use, a count

    def reusable(
        self, shared: int, recurrent: bool, chunk_ends: Sequence[int] | None = None
    ) -> int:
        """Longest reusable prefix within `shared` tokens.

        Args:
            shared: tokens that the prompt has in common with this prefix.
            chunk_ends: of the prompt: up to `fresh` it reuses only what it would compute to the
                bit; None reuses whatever there is, which may be rounded otherwise.
        """
        lengths = [n for n in (self.snapshots if recurrent else self.chunk_ends) if n <= shared]
        if not recurrent and shared >= self.decoded:
            lengths.append(shared)
        if lengths and chunk_ends is not None:
            cuts, parted = set(chunk_ends), self._parted(chunk_ends)
            lengths = [n for n in lengths if n > self.fresh or n in cuts]
            lengths = [n for n in lengths if min(n, self.fresh) < parted]
        return max(lengths, default=0)

    def alike(self, length: int, chunk_ends: Sequence[int]) -> bool:
        """True if a prompt with these chunk ends computes the same bytes up to a length."""
        return min(length, self.fresh) < self._parted(chunk_ends)

    def _parted(self, chunk_ends: Sequence[int]) -> float:
        """First chunk end that either this prefix or a prompt has, and not both; inf without."""
        return min({*self.chunk_ends} ^ {*chunk_ends}, default=inf)


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix that a prompt reuses."""

    prefix: Prefix  # in the cache
    length: int  # tokens of it that are reused


class PrefixCache:
    """Kept prefixes; the least recently used one gives its pages and snapshots back first."""

    def __init__(
        self, pages: Pool, snapshots: Pool, recurrent: bool, most: int = MOST_PREFIXES
    ) -> None:
        """Begin empty; most: prefixes that are kept."""
        self._pages, self._snapshots, self._recurrent = pages, snapshots, recurrent
        self._most = most
        self._prefixes: list[Prefix] = []
        self._clock = 0

    def __len__(self) -> int:
        """Number of prefixes."""
        return len(self._prefixes)

    def find(
        self, keys: ArrayLike, most: int, chunk_ends: Sequence[int] | None = None
    ) -> Hit | None:
        """Prefix of which a prompt can reuse the most, up to `most` tokens; None without one.

        Args:
            chunk_ends: of the prompt, see `Prefix.reusable`.
        """
        keys = np.asarray(keys, dtype=np.int64)
        best, length = None, 0
        for prefix in self._prefixes:
            shared = min(_common(prefix.keys, keys), most)
            if shared > length:
                found = prefix.reusable(shared, self._recurrent, chunk_ends)
                if found > length:
                    best, length = prefix, found
        if best is None:
            return None
        self._touch(best)
        return Hit(best, length)

    def insert(self, prefix: Prefix) -> None:
        """Keep a prefix in place of the ones that it extends, as an owner of its pages."""
        for other in list(self._prefixes):
            length = len(other.keys)
            begins = _common(other.keys, prefix.keys) == length
            if begins and prefix.alike(length, other.chunk_ends):  # else their bytes differ
                self._inherit(prefix, other)
                self._remove(other)
        self._pages.share(prefix.pages)
        self._prefixes.append(prefix)
        self._touch(prefix)
        if len(self._prefixes) > self._most:
            self._remove(self._oldest())

    def make_room(self, pages: int) -> bool:
        """Drop prefixes until so many pages are free; False if all of them would not suffice."""
        if self._pages.free < pages and self._possible() < pages:
            return False
        while self._pages.free < pages:
            self._remove(self._oldest())
        return True

    def take_snapshot(self) -> int | None:
        """Number for a snapshot: a free one, or one of the least recently used prefix.

        None where no number is free and no prefix has one.
        """
        if not self._snapshots.free:
            holders = [prefix for prefix in self._prefixes if prefix.snapshots]
            if not holders:
                return None
            oldest = min(holders, key=lambda prefix: prefix.used)
            self._snapshots.drop([oldest.snapshots.pop(min(oldest.snapshots))])
        return self._snapshots.take(1)[0]

    def clear(self) -> None:
        """Drop all prefixes."""
        for prefix in list(self._prefixes):
            self._remove(prefix)

    def _possible(self) -> int:
        held = Counter(page for prefix in self._prefixes for page in prefix.pages)
        return self._pages.free + sum(self._pages.owners(page) == n for page, n in held.items())

    def _inherit(self, prefix: Prefix, other: Prefix) -> None:
        for length in list(other.snapshots):
            if length not in prefix.snapshots:
                prefix.snapshots[length] = other.snapshots.pop(length)

    def _touch(self, prefix: Prefix) -> None:
        self._clock += 1
        prefix.used = self._clock

    def _oldest(self) -> Prefix:
        return min(self._prefixes, key=lambda prefix: prefix.used)

    def _remove(self, prefix: Prefix) -> None:
        self._prefixes.remove(prefix)
        self._pages.drop(prefix.pages)
        self._snapshots.drop(prefix.snapshots.values())


def shared_pages(hit: Hit) -> tuple[list[int], int | None]:
    """Pages that a prompt shares with a prefix, and the partly used page that it must copy."""
    whole = hit.length // PAGE
    return hit.prefix.pages[:whole], hit.prefix.pages[whole] if hit.length % PAGE else None


def new_prefix(
    keys: ArrayLike, pages: Sequence[int], chunk_ends: Sequence[int], decoded: int, fresh: int
) -> Prefix:
    """Prefix of all given tokens, with those of the pages that hold them."""
    keys = np.asarray(keys, dtype=np.int64)
    return Prefix(
        keys=keys,
        pages=list(pages[: pages_for(len(keys))]),
        chunk_ends=tuple(end for end in chunk_ends if end <= len(keys)),
        decoded=decoded,
        fresh=fresh,
    )


def prefix_keys(ids: Sequence[int], request: Request) -> NDArray[np.int64]:
    """Keys of a request's tokens, [T] int64: equal where they compute the same keys and values.

    They are ids, changed by the hash of whatever else goes into the prompt at these tokens. The
    salt changes the first one, without which nothing is shared. A token of an image is changed by
    what the image is, by its form and by the token's place in it, so angles behind equal keys are
    equal, too.
    """
    keys = np.array(ids, dtype=np.int64)
    if request.salt:
        keys[:1] ^= _number(request.salt)
    for each in request.images:
        form = each.rows.to_bytes(4, "big") + each.columns.to_bytes(4, "big")
        own = keys[each.start : each.stop]  # fewer than all where the prefix ends in the image
        own ^= np.arange(len(own), dtype=np.int64) + _number(form + each.digest)
    return keys


def _number(origin: bytes) -> int:
    return int.from_bytes(blake2b(origin, digest_size=8).digest(), "big", signed=True)


def _common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Number of keys [T] that two sequences begin with in common."""
    count = min(len(a), len(b))
    for start in range(0, count, BLOCK):  # most differ in the first block
        stop = min(start + BLOCK, count)
        different = a[start:stop] != b[start:stop]
        first = int(different.argmax())
        if different[first]:
            return start + first
    return count
