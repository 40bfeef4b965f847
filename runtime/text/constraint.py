"""The tokens that may come next in one request, decided on the host token by token."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Constraint(Protocol):
    """Limits the tokens of one request; made for it alone, and called by one thread at a time.

    `mask` is asked once before every token, `accept` is told every token that another follows. An
    error of any method ends this request and no other, but for errors of a copy.

    Drafts need a constraint that can be copied: a copy is told the drafts one after another and
    asked for a mask behind each, while the constraint itself is told the tokens that were chosen.

    Attributes:
        done: every token may come from here on, and nothing is asked or told any more.
        free_tokens: so many tokens, whatever they are, come next without a mask. The host need not
            read a token before the device goes on while there are more than are under way.
    """

    @property
    def done(self) -> bool:
        """True once it limits nothing any more."""
        return False

    @property
    def free_tokens(self) -> int:
        """Tokens that come next without a mask; 0 where that depends on what they are."""
        return 0

    def mask(self) -> "Tensor | None":
        """Tokens that may come next.

        Returns:
            [ceil(V / 32)] int32 on the host, of V real tokens: bit i of word w is set where token
            32 * w + i may come. It is copied before the next call. None allows every token.
        """

    def accept(self, token: int) -> None:
        """Go on behind a token that was chosen."""

    def copy(self) -> "Constraint | None":
        """Another one in the same state; what one of the two is told or asked leaves the other.

        A copy may be told a token that its mask forbids, and may raise any error then.

        Returns:
            None if it can never be copied: nothing is drafted for the request.
        """
        return None

    def forced(self, most: int) -> Sequence[int]:
        """Tokens that come next because no others may, up to `most`: they are drafted.

        Only a copy is asked. A wrong token costs time and nothing else, since the masks alone
        decide what is chosen.
        """
        return ()
