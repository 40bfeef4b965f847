"""Checkpoint to packed checkpoint and quality report."""
