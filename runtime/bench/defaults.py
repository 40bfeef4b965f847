"""Defaults of `bench`, apart from the code that needs torch."""

PROMPT_TOKENS = 64
NEW_TOKENS = 128
RUNS = 3
