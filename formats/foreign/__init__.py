"""Checkpoints that other tools pack their own way, in the terms of SPEC.md."""
