"""`generation_config.json`: sampling defaults and tokens that end a text."""

from dataclasses import dataclass
from pathlib import Path

from lowbit.formats.errors import CheckpointError
from lowbit.formats.fields import Field, read_fields, read_ids
from lowbit.formats.safetensors.checkpoint import read_json
from lowbit.formats.sampling_ranges import SAMPLING

GENERATION_FILE = "generation_config.json"
# transformers writes null for a default that was not set.
DO_SAMPLE = Field("do_sample", "flag", default=False, nullable=True)


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Sampling parameters that the makers of a model recommend."""

    temperature: float = 0.0  # 0 for greedy: `do_sample` is false, or the temperature is 0
    top_k: int = 0  # 0 is off, also where the file has none
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off
    presence_penalty: float = 0.0  # 0 is off
    frequency_penalty: float = 0.0  # 0 is off
    eos_token_ids: tuple[int, ...] | None = None  # None where the file names none


def load_generation_config(folder: Path, vocab_size: int) -> GenerationConfig:
    """Read the generation_config.json of a model folder; greedy where there is none.

    Args:
        vocab_size: of config.json; an end token past it could never be produced.

    Raises:
        CheckpointError: a value of the wrong type or out of range.
    """
    path = folder / GENERATION_FILE
    if not (path.exists() or path.is_symlink()):  # a dangling link is an error below
        return GenerationConfig()
    content, where = read_json(path), f"`{path}`"
    values = read_fields(content, (DO_SAMPLE, *SAMPLING), where, CheckpointError)
    if not values.pop(DO_SAMPLE.key):
        values["temperature"] = 0.0
    ids = read_ids(content, "eos_token_id", vocab_size, where, CheckpointError)
    return GenerationConfig(**values, eos_token_ids=ids or None)
