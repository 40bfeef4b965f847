"""Bits where they count: what each fused set's precision costs, and which to take."""
