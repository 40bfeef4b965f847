"""Limits on how many sequences `lowbit-run` decodes together, for the commands of both programs.

They follow from the kernels: `runtime/thresholds.py` has the tokens of a step.
"""

MOST_SEQUENCES = 256  # decoded together: the tokens of a step
CHOSEN_SEQUENCES = 64  # at most, where memory decides on a GPU: one part of a step
