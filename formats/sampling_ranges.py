"""Sampling settings: names, types and ranges, for files, options and the Python API alike.

Imports no torch, so that options can be completed without it.
"""

from lowbit.formats.fields import Field

MOST_TEMPERATURE = 1000
MOST_PENALTY = 100  # beyond it logits overflow
SEEDS = 2**63  # seeds are 0 to SEEDS - 1

# Defaults are those of transformers for a file that samples. A file may have null in their place.
SAMPLING = (
    Field("temperature", "number", least=0, most=MOST_TEMPERATURE, default=1.0, nullable=True),
    Field("top_k", least=0, most=2**22, default=0, nullable=True),
    Field("top_p", "number", least=0, most=1, exclusive=True, default=1.0, nullable=True),
    Field("min_p", "number", least=0, most=1, default=0.0, nullable=True),
    Field(
        "repetition_penalty",
        "number",
        least=1 / MOST_PENALTY,
        most=MOST_PENALTY,
        default=1.0,
        nullable=True,
    ),
    Field(
        "presence_penalty",
        "number",
        least=-MOST_PENALTY,
        most=MOST_PENALTY,
        default=0.0,
        nullable=True,
    ),
)
SEED = Field("seed", least=0, most=SEEDS - 1, default=None, nullable=True)
SETTINGS = {field.key: field for field in (*SAMPLING, SEED)}
