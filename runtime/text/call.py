"""A tool call that a model has written."""

from dataclasses import dataclass
from typing import Final, Literal

Unfinished = Literal["unfinished"]
UNFINISHED: Final = "unfinished"  # a closing tag that is part of a value: the call goes on


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call.

    Attributes:
        name: of the function.
        arguments: a JSON object.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call that is certain to be meant, before its arguments are complete."""

    name: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Some text of the arguments of a begun call.

    Attributes:
        text: of a JSON object.
        last: the call is complete. A begun call is broken where text or another call follows
            without it.
    """

    text: str
    last: bool = False
