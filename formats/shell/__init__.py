"""The shell of both commands: entry, errors, options, output. Alone in formats it may use click."""
