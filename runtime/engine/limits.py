"""Numbers that options name, apart from the code that needs torch."""

MOST_SEQUENCES = 64  # decoded together, from the command line
SEQUENCES = 16  # of them, for a file of prompts

# Defaults of `bench`.
PROMPT_TOKENS = 64
NEW_TOKENS = 128
RUNS = 3
