"""This machine: what works on it, how fast a model will be, which models are there."""
