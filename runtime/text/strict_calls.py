"""Calls of tools that follow their schema, in an answer whose other text is free."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lowbit.formats.errors import RequestError
from lowbit.runtime.text.grammar import Grammar, GrammarConstraint


@dataclass(frozen=True, slots=True, eq=False)
class StrictCalls:
    """A grammar that begins with a token and ends with another, any number of times."""

    opening: int  # id of `<tool_call>`
    closing: int  # id of `</tool_call>`
    grammar: Grammar  # grammar from behind the first up to the second

    def constraint(self) -> "StrictCallsConstraint":
        """The constraint of one answer."""
        return StrictCallsConstraint(self)


class StrictCallsConstraint:
    """Follows one answer: free text costs no mask, and the host need not read it in time.

    For that, the token behind `<tool_call>` is free too. Where no call can begin with it, the tag
    is text like any other.
    """

    def __init__(self, calls: StrictCalls) -> None:
        """Start before the first token."""
        self._calls = calls
        self._call: GrammarConstraint | None = None  # that is being written
        self._begins = False  # its first token comes next

    @property
    def done(self) -> bool:
        """Never: another call may come."""
        return False

    @property
    def free_tokens(self) -> int:
        """Tokens up to the second of a call that may come next; see `Constraint`."""
        if self._call is None:
            return 2
        return 1 if self._begins else 0

    def mask(self) -> Tensor | None:
        """Tokens that may come next; see `Constraint`."""
        return None if self._call is None or self._begins else self._call.mask()

    def accept(self, token: int) -> None:
        """Go on behind a token; see `Constraint`."""
        if self._call is None:
            if token == self._calls.opening:
                self._call, self._begins = self._calls.grammar.constraint(), True
            return
        try:
            self._call.accept(token)
        except RequestError:
            if not self._begins:
                raise
            self._call = None
        self._begins = False
        if token == self._calls.closing:
            self._call = None

    def copy(self) -> "StrictCallsConstraint":
        """Another one in the same state."""
        other = copy.copy(self)
        other._call = None if self._call is None else self._call.copy()
        return other

    def forced(self, most: int) -> Sequence[int]:
        """Tokens of a call that come next; see `Constraint`."""
        return () if self._call is None or self._begins else self._call.forced(most)
