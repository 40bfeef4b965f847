"""Attention over pages: decode steps and prompts."""
