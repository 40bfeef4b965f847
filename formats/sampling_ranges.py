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


def _number(key: str, least: float, most: float, default: float, exclusive: bool = False) -> Field:
    """A number that is `default`, as in transformers, where a file has null or nothing."""
    return Field(key, "number", least, most, exclusive, default=default, nullable=True)


SAMPLING = (
    _number("temperature", 0, MOST_TEMPERATURE, 1.0),
    Field("top_k", least=0, most=2**22, default=0, nullable=True),
    _number("top_p", 0, 1, 1.0, exclusive=True),
    _number("min_p", 0, 1, 0.0),
    _number("repetition_penalty", 1 / MOST_REPETITION, MOST_REPETITION, 1.0),
    _number("presence_penalty", -MOST_PENALTY, MOST_PENALTY, 0.0),
    _number("frequency_penalty", -MOST_PENALTY, MOST_PENALTY, 0.0),
)
SEED = Field("seed", least=0, most=SEEDS - 1, default=None, nullable=True)
SETTINGS = {field.key: field for field in (*SAMPLING, SEED)}  # those that an option can give
LOGPROBS = Field("logprobs", least=0, most=MOST_LOGPROBS, default=None, nullable=True)
BIAS = Field("logit_bias", "number", least=-MOST_BIAS, most=MOST_BIAS)  # of one token
