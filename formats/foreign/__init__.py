"""Checkpoints of other tools' layouts, translated into the layout of SPEC.md."""
