"""Answers of a model to prompts, sampled from its own distribution, with the prompts before them.

Prompts are left-padded and answered in batches. A batch is a power of two, so that a little more
or less free memory does not change what is drawn. The model is whole in memory, as transformers
runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.original.model import store_frequencies, without_storage
from lowbit.convert.original.progress import Progress
from lowbit.convert.original.walk import HEAD_ROWS
from lowbit.convert.original.weights import Weights
from lowbit.formats.architectures import Config
from lowbit.formats.architectures.footprint import kv_bytes, state_bytes
from lowbit.formats.errors import CheckpointError, RequestError, ResourceError
from lowbit.formats.machine.memory import free_bytes
from lowbit.formats.text.template import THINKING, ChatTemplate
from lowbit.formats.text.tokenizer import TextTokenizer

FAST_BF16 = "AVX512"  # of CPUs; on others BF16 products are many times slower than FP32
BATCH = {"cpu": 16, "cuda": 256}  # answers at a time, where memory allows
LOGIT_BYTES = 20  # for each logit of a step: the model's, FP32, probabilities and copies
LINEAR_BYTES = 64  # for each value of a linear layer and token of a prompt: FP32 and copies
CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and its answer."""

    text: str  # the prompt and the answer, special tokens included
    tokens: int  # of the answer, the token that ends it included
    ended: bool  # the model ended it; else it was cut


@dataclass(frozen=True, slots=True)
class Asked:
    """Prompts as a model reads them."""

    texts: tuple[str, ...]  # as the chat template writes them
    ids: tuple[list[int], ...]  # their tokens
    tokens: int  # of an answer at most

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.ids))


def ask(
    prompts: Sequence[str],
    template: ChatTemplate,
    tokenizer: TextTokenizer,
    config: Config,
    tokens: int,
) -> Asked:
    """Render prompts by the chat template, every second one with thinking if it can be switched.

    Args:
        prompts: one user message each, at least one.
        tokens: of an answer at most.

    Raises:
        RequestError: the template refuses a prompt, or prompt and answer exceed the context.
        CheckpointError: the template or the tokenizer is broken.
    """
    switched = _switches_thinking(template, prompts[0])
    texts = tuple(
        template.render(_message(prompt), (number % 2 == 0) if switched else None)
        for number, prompt in enumerate(prompts)
    )
    asked = Asked(texts, tuple(tokenizer.encode_all(texts)), tokens)
    for ids in asked.ids:
        tokenizer.check_ids(ids, config.vocab_size)
    room = config.max_position_embeddings - asked.longest
    if tokens > room:
        raise RequestError(
            f"answers of {tokens} tokens to prompts of up to {asked.longest} exceed the model's "
            f"context of {config.max_position_embeddings}",
            hint=f"--tokens {room} fits" if room > 0 else "the model cannot answer these prompts",
        )
    return asked


def fitting_batch(asked: Asked, config: Config, weights: int, itemsize: int, device: str) -> int:
    """Answers that fit into the free memory at a time.

    Args:
        itemsize: bytes of a number of the model's dtype.

    Raises:
        ResourceError: the weights and one answer do not fit.
    """
    free = free_bytes(device)
    if free is None:
        return BATCH[device]
    each = _answer_bytes(asked, config, itemsize)
    fitting = (free - weights) // each
    if fitting < 1:
        memory = "memory" if device == "cpu" else "the GPU's memory"
        raise ResourceError(
            f"answers of the original take {(weights + each) / 1e9:.1f} GB of {memory}, free: "
            f"{free / 1e9:.1f} GB",
            hint="calibrate on the bundled text, which passes through the model layer by layer"
            if device == "cpu"
            else "--device cpu answers in the machine's memory",
        )
    return min(BATCH[device], 1 << (fitting.bit_length() - 1))


def answer(
    model: Any,
    asked: Asked,
    tokenizer: TextTokenizer,
    ends: Sequence[int],
    *,
    batch: int,
    seed: int,
    progress: Progress,
) -> list[Answer]:
    """Sample an answer to every prompt at temperature 1, from all of the vocabulary.

    Raises:
        CheckpointError: the tokenizer fails.
    """
    model.generation_config = _sampling(asked.tokens, ends)
    count, total = len(asked.ids), len(asked.ids) * asked.tokens
    found: list[Answer] = []
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.inference_mode():
        torch.manual_seed(seed)
        for start in range(0, count, batch):
            ids = asked.ids[start : start + batch]
            steps = _Steps(start * asked.tokens, total, len(ids), progress)
            for text, new in zip(asked.texts[start:], _generate(model, ids, steps), strict=False):
                found.append(_as_answer(text, new, tokenizer, ends))
            progress("answer", (start + len(ids)) * asked.tokens, total)
    return found


class _Steps:
    """A stopping criterion of transformers that stops nothing and reports every step."""

    def __init__(self, done: int, total: int, each: int, progress: Progress) -> None:
        self.done, self.total, self.each, self.progress = done, total, each, progress

    def __call__(self, ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self.done += self.each
        self.progress("answer", self.done, self.total)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def _generate(model: Any, prompts: Sequence[list[int]], steps: _Steps) -> list[list[int]]:
    """Tokens after each prompt, with padding after the end."""
    from transformers import StoppingCriteriaList

    width = max(map(len, prompts))
    pad = model.generation_config.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        input_ids=ids,
        attention_mask=mask.to(model.device),
        stopping_criteria=StoppingCriteriaList([steps]),
    )
    rows: list[list[int]] = out[:, width:].tolist()
    return rows


def _as_answer(text: str, new: list[int], tokenizer: TextTokenizer, ends: Sequence[int]) -> Answer:
    end = next((n for n, id in enumerate(new) if id in ends), None)
    ids = new if end is None else new[: end + 1]
    said = tokenizer.decode(ids)
    if end is None:
        said = said.rstrip(CUT_CHARACTER)  # a character whose last bytes were cut off
    return Answer(text + said, len(ids), end is not None)


def _sampling(tokens: int, ends: Sequence[int]) -> Any:
    """The model's own distribution; its makers' defaults would sharpen it."""
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
    )


def _switches_thinking(template: ChatTemplate, prompt: str) -> bool:
    """Tell if the template writes another prompt with thinking than without."""
    if THINKING not in template.source:
        return False
    message = _message(prompt)
    return template.render(message, True) != template.render(message, False)


def _message(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _answer_bytes(asked: Asked, config: Config, itemsize: int) -> int:
    """Memory of one answer: cache, logits and the activations of its prompt."""
    cache = kv_bytes(config, asked.longest + asked.tokens, itemsize) + state_bytes(config, itemsize)
    width = 4 * config.intermediate_size + 8 * config.hidden_size
    activations = width * itemsize
    if config.linear_layers is not None:
        activations += LINEAR_BYTES * config.linear_layers.value_dim
    work = asked.longest * activations + LOGIT_BYTES * config.vocab_size
    return (cache + work) * 5 // 4


def dtype_on(device: torch.device) -> torch.dtype:
    """The dtype in which a device runs a model: BF16, but FP32 on a CPU without fast BF16."""
    if device.type == "cpu" and torch.backends.cpu.get_cpu_capability() != FAST_BF16:
        return torch.float32
    return torch.bfloat16


def build(weights: Weights, dtype: torch.dtype) -> Any:
    """The `...ForCausalLM` of a checkpoint without storage for its weights.

    Raises:
        UnsupportedModelError: transformers does not know the architecture.
        CheckpointError: config.json is not valid, or a weight is missing or has another shape.
    """
    model = without_storage(weights, dtype)
    for name, parameter in model.named_parameters():
        found = weights.shape(_in_file(name, weights))
        if found != tuple(parameter.shape):
            raise CheckpointError(
                f"`{weights.name}`: `{_in_file(name, weights)}` has shape {list(found)}, expected "
                f"{list(parameter.shape)}"
            )
    return model


def size_bytes(model: Any) -> int:
    """Bytes of the weights, those shared by two modules once."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def fill(model: Any, weights: Weights, device: torch.device) -> None:
    """Give a model of `build` its weights, on the device.

    Raises:
        CheckpointError: a weight that is not of BF16, F16 or F32.
    """
    for name, parameter in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        stored = _in_file(name, weights)
        if values.ndim == 2:
            for first, rows in weights.rows(stored, HEAD_ROWS, device):
                values[first : first + len(rows)] = rows
        else:
            values.copy_(weights.read(stored, tuple(values.shape), device))
        whole = torch.nn.Parameter(values, requires_grad=False)
        setattr(module, name.rpartition(".")[2], whole)
    model.tie_weights()
    store_frequencies(model.model, device)


def _in_file(name: str, weights: Weights) -> str:
    """Name in the checkpoint of a parameter of the model."""
    if not name.startswith("model."):
        return name
    prefix = weights.checkpoint.prefix
    return prefix + name.removeprefix("model.")
