"""The commands of `lowbit-run`."""
