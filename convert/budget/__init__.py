"""Bits under a budget: costs of every fused set, and the choice that loses least."""
