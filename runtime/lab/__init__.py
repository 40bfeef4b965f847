"""Measure, tune and compile a model on a machine, and check what the machine lacks."""
