"""Sampling settings: names, types and ranges, shared by files, options and the Python API.

The module does not import torch, so that completion of options is fast.
"""

from lowbit.formats.fields import Field

MOST_TEMPERATURE = 1000
MOST_REPETITION = 100  # logits overflow above it
MOST_PENALTY = 2  # of presence and frequency, either way, as the OpenAI API has it
MOST_BIAS = 100  # added to a logit, either way, as the OpenAI API has it
MOST_BIASES = 300  # tokens that one request may bias
MOST_LOGPROBS = 20  # likeliest tokens whose log-probabilities a request may ask for
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
        least=1 / MOST_REPETITION,
        most=MOST_REPETITION,
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
    Field(
        "frequency_penalty",
        "number",
        least=-MOST_PENALTY,
        most=MOST_PENALTY,
        default=0.0,
        nullable=True,
    ),
)
SEED = Field("seed", least=0, most=SEEDS - 1, default=None, nullable=True)
SETTINGS = {field.key: field for field in (*SAMPLING, SEED)}  # those that an option can give
LOGPROBS = Field("logprobs", least=0, most=MOST_LOGPROBS, default=None, nullable=True)
BIAS = Field("logit_bias", "number", least=-MOST_BIAS, most=MOST_BIAS)  # of one token
