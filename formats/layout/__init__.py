"""Bits, scales and names of a packed checkpoint."""
