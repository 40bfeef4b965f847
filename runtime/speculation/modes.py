"""Modes of speculation and their bounds, apart from the code that needs torch."""

from typing import Literal, get_args

Mode = Literal["off", "ngram", "mtp", "dflash", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)
DRAFTER_MODES: tuple[Mode, ...] = ("dflash", "auto")  # in which a drafter drafts
DEFAULT_MODE: Mode = "off"  # of the commands and of `load`
MOST_DRAFTS = 15  # with the token before them they get the bits that each has alone
