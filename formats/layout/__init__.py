"""Layout of a packed checkpoint: bits, scales, names and records."""
