"""The next token of each row: adjust, choose, draw, verify, log-probabilities."""
