"""Modes of speculation and their bounds, apart from the code that needs torch."""

from typing import Literal, get_args

Mode = Literal["off", "ngram", "mtp", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)
DEFAULT_MODE: Mode = "off"  # of the commands and of `load`
MOST_DRAFTS = 15  # with the token before them they get the bits that each has alone
