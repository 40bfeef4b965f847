"""A prompt and an answer as text and as tokens."""
