"""Numbers that options name, apart from the code that needs torch."""

MOST_SEQUENCES = 8  # decoded together

# Defaults of `bench`.
PROMPT_TOKENS = 64
NEW_TOKENS = 128
RUNS = 3
