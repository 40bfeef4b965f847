"""The machine: memory, cores and time limits."""
