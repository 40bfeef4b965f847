"""Packed checkpoint to tokens. Never imports transformers or the converter."""
