"""Sampling settings: names, types and ranges, shared by files, options and the Python API.

The module does not import torch, so that completion of options is fast.
"""

from lowbit.formats.fields import Field

MOST_TEMPERATURE = 1000
MOST_PENALTY = 100  # logits overflow above it
SEEDS = 2**63  # seeds are 0 to SEEDS - 1

# Defaults are those of transformers for a file with do_sample; null in a file stands for them.
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
