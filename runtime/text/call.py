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
