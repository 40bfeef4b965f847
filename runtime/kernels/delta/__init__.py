"""Gated DeltaNet: decode steps and prompts."""
