"""A smaller vocabulary: fewer tokens, and an original that has rows for them alone."""
