"""Launches for the card of this machine: tried in decode steps, kept for `load`."""
