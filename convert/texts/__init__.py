"""Texts to calibrate on, to compare logits on, and to count tokens of."""
