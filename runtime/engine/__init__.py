"""The engine: requests become tokens, steps for several of them at a time."""
