"""Numbers that options name, apart from the code that needs torch."""

MOST_SEQUENCES = 8  # decoded together

# What `bench` measures unless told otherwise.
PROMPT_TOKENS = 64
NEW_TOKENS = 128
RUNS = 3
