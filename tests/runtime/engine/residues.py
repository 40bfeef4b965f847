"""Constraints by arithmetic, which any answer can follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lowbit.runtime.text.constraint import Constraint
from tests.short_models import SHORT_VOCABULARY

V = SHORT_VOCABULARY


def words_of(ids: range, size: int = V) -> Tensor:
    """The mask that allows these tokens of so many."""
    bits = torch.zeros(size, dtype=torch.int64)
    bits[torch.tensor(ids)] = 1
    words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
    return words.to(torch.int32)


@dataclass
class Residues(Constraint):
    """The id of token n leaves the remainder that the tokens before it give.

    Every `free`-th token is not limited.
    """

    free: int = 5
    fails: Callable[[list[int]], None] = lambda tokens: None
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    free_tokens: int = 0
    size: int = V  # of the vocabulary

    def rest(self, count: int) -> int:
        return sum(self.tokens[:count]) % 7

    def mask(self) -> Tensor | None:
        self.fails(self.tokens)
        if len(self.tokens) % self.free == self.free - 1:
            return None
        return words_of(range(self.rest(len(self.tokens)), self.size - 96, 7), self.size)

    def accept(self, token: int) -> None:
        self.tokens.append(token)


def follows(tokens: tuple[int, ...], free: int = 5, size: int = V) -> bool:
    return all(
        n % free == free - 1 or (token % 7 == sum(tokens[:n]) % 7 and token < size - 96)
        for n, token in enumerate(tokens)
    )


@dataclass
class Foreseen(Residues):
    """It can be copied, and a guess tells what comes next, right or wrong.

    Attributes:
        guess: gives up to so many tokens behind those that it was told.
    """

    guess: Callable[[Sequence[int], int], Sequence[int]] = lambda tokens, most: ()

    def copy(self) -> "Foreseen":
        return replace(self, tokens=list(self.tokens))

    def forced(self, most: int) -> Sequence[int]:
        return self.guess(self.tokens, most)


@dataclass
class Later(Constraint):
    """Residues behind so many tokens that nothing limits."""

    first: int
    then: Residues = field(default_factory=Residues)
    count: int = 0

    @property
    def free_tokens(self) -> int:
        return max(0, self.first - self.count)

    def mask(self) -> Tensor | None:
        return self.then.mask() if self.count >= self.first else None

    def accept(self, token: int) -> None:
        self.count += 1
        if self.count > self.first:
            self.then.accept(token)


def guessing(
    truth: Sequence[int], right: Callable[[int], int], drafts: int = 15
) -> Callable[[Sequence[int], int], Sequence[int]]:
    """Guesses of so many tokens, of which so many are right."""

    def guess(tokens: Sequence[int], most: int) -> list[int]:
        found = list(truth[len(tokens) : len(tokens) + min(most, drafts)])
        if (good := right(len(found))) < len(found):
            found[good] = (found[good] + 7) % (V - 96)  # allowed where it stands
        return found

    return guess
