"""Results as tables in the terminal, and as JSON."""
