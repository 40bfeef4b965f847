"""Weights on their way from a file to a device."""
