"""A calibration text in the model's own words: its answers to prompts, then the bundled texts.

Answers are sampled from the model's own distribution. Prompts are left-padded and answered in
batches. A batch is a power of two, so that a little more or less free memory does not change what
is drawn. The model is whole in memory, as transformers runs it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.original.device import open_device
from lowbit.convert.original.model import store_frequencies, without_storage
from lowbit.convert.original.progress import Progress, silent
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.runnable import check_can_run
from lowbit.convert.original.walk import HEAD_ROWS
from lowbit.convert.original.weights import Weights, open_dense
from lowbit.convert.plan.memory import answer_bytes, answers_that_fit
from lowbit.convert.plan.plan import make_plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.texts.calibration import with_bundled
from lowbit.convert.texts.prompts import prompts
from lowbit.formats.architectures import Config
from lowbit.formats.errors import CheckpointError, RequestError, ResourceError
from lowbit.formats.files.atomic import check_place, replace_file
from lowbit.formats.generation import load_generation_config
from lowbit.formats.hub.locate import locate
from lowbit.formats.machine.cores import multiplies_bf16
from lowbit.formats.text.template import THINKING, ChatTemplate, load_chat_template
from lowbit.formats.text.tokenizer import TextTokenizer, load_text_tokenizer

BATCH = {"cpu": 16, "cuda": 256}  # answers at a time, where memory allows
CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class OwnTextRequest:
    """Settings of `write_own_text`."""

    answers: int
    tokens: int  # of an answer at most
    device: str
    seed: int
    revision: str | None  # of the source on the Hub
    overwrite: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and its answer."""

    text: str  # the prompt and the answer, special tokens included
    tokens: int  # of the answer, the token that ends it included
    ended: bool  # the model ended it; else it was cut


@dataclass(frozen=True, slots=True)
class RenderedPrompts:
    """Prompts as a model reads them."""

    texts: tuple[str, ...]  # as the chat template writes them
    ids: tuple[list[int], ...]  # their tokens
    tokens: int  # of an answer at most

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.ids))


@dataclass(frozen=True, slots=True)
class OwnText:
    """A calibration text in its place."""

    file: Path
    answers: tuple[Answer, ...]  # of the model
    batch: int  # answers that were generated at a time
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def ended(self) -> int:
        """Answers that the model ended itself; the others were cut."""
        return sum(answer.ended for answer in self.answers)


def write_own_text(
    source: str | Path, out: Path, request: OwnTextRequest, progress: Progress = silent
) -> OwnText:
    """Let a model answer prompts, and write prompts, answers and the bundled texts into a file.

    The same arguments give the same bytes on the same machine, as long as its free memory allows
    the same batches.

    Raises:
        ResourceError: `out` exists or cannot be written, or the model does not fit into memory.
        CheckpointError: not a checkpoint, or one without tokenizer or chat template.
        QuantizationError: the checkpoint is quantized.
        UnsupportedModelError: the architecture is not supported.
        RequestError: prompts and answers exceed the model's context.
    """
    started = time.monotonic()
    tokens, seed, target = request.tokens, request.seed, open_device(request.device)
    _check_output(out, request.overwrite)
    folder = locate(str(source), request.revision).folder
    weights = open_dense(folder)
    checkpoint, config = weights.checkpoint, weights.checkpoint.sizes
    make_plan(checkpoint.config, checkpoint.tensors, Recipe())  # checks every tensor
    check_can_run(folder, checkpoint.config)
    tokenizer = load_text_tokenizer(folder, "calibration")
    template = load_chat_template(folder)
    if template is None:
        raise CheckpointError(
            f"`{folder}` has no chat template, by which it would be asked",
            hint="a base model is calibrated on the bundled text or a --calib text of yours",
        )
    rendered = render_prompts(prompts(request.answers, seed), template, tokenizer, config, tokens)
    generation = load_generation_config(folder, config.vocab_size)
    ends = generation.eos_token_ids or config.eos_token_ids
    with without_advice():
        dtype = dtype_on(target)
        model = build_model(weights, dtype)
        each = answer_bytes(config, rendered.longest, tokens, dtype.itemsize)
        batch = answers_that_fit(each, size_bytes(model), BATCH[target.type], target.type)
        load_weights(model, weights, target)
        answers = answer(model, rendered, tokenizer, ends, batch, seed, progress)
    text = "\n".join(one.text for one in answers)
    replace_file(out, with_bundled(text).encode())
    return OwnText(out, tuple(answers), batch, time.monotonic() - started)


def _check_output(out: Path, overwrite: bool) -> None:
    if out.suffix != ".txt":
        raise ResourceError(f"`{out}`: a calibration text has a name that ends in .txt")
    if out.exists() and not overwrite:
        raise ResourceError(
            f"`{out}` exists already", hint="choose another name, or replace it with --overwrite"
        )
    check_place(out)


def render_prompts(
    prompts: Sequence[str],
    template: ChatTemplate,
    tokenizer: TextTokenizer,
    config: Config,
    tokens: int,
) -> RenderedPrompts:
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
    rendered = RenderedPrompts(texts, tuple(tokenizer.encode_all(texts)), tokens)
    for ids in rendered.ids:
        tokenizer.check_ids(ids, config.vocab_size)
    room = config.max_position_embeddings - rendered.longest
    if tokens > room:
        raise RequestError(
            f"answers of {tokens} tokens to prompts of up to {rendered.longest} exceed the model's "
            f"context of {config.max_position_embeddings}",
            hint=f"--tokens {room} fits" if room > 0 else "the model cannot answer these prompts",
        )
    return rendered


def answer(
    model: Any,
    rendered: RenderedPrompts,
    tokenizer: TextTokenizer,
    ends: Sequence[int],
    batch: int,
    seed: int,
    progress: Progress,
) -> list[Answer]:
    """Sample an answer to every prompt at temperature 1, from all of the vocabulary.

    Raises:
        CheckpointError: the tokenizer fails.
    """
    model.generation_config = _sampling(rendered.tokens, ends)
    count, total = len(rendered.ids), len(rendered.ids) * rendered.tokens
    answers: list[Answer] = []
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.inference_mode():
        torch.manual_seed(seed)
        for start in range(0, count, batch):
            ids = rendered.ids[start : start + batch]
            steps = _Steps(start * rendered.tokens, total, len(ids), progress)
            for text, new in zip(
                rendered.texts[start:], _generate(model, ids, steps), strict=False
            ):
                answers.append(_as_answer(text, new, tokenizer, ends))
            progress("answer", (start + len(ids)) * rendered.tokens, total)
    return answers


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


def dtype_on(device: torch.device) -> torch.dtype:
    """The dtype in which a device runs a model: BF16, but FP32 on a CPU without fast BF16."""
    in_bf16 = device.type != "cpu" or multiplies_bf16()
    return torch.bfloat16 if in_bf16 else torch.float32


def build_model(weights: Weights, dtype: torch.dtype) -> Any:
    """The `...ForCausalLM` of a checkpoint without storage for its weights.

    Raises:
        UnsupportedModelError: transformers does not know the architecture.
        CheckpointError: config.json is not valid, or a weight is missing or has another shape.
    """
    model = without_storage(weights, dtype)
    for name, parameter in model.named_parameters():
        shape = weights.shape(_in_file(name, weights))
        if shape != tuple(parameter.shape):
            raise CheckpointError(
                f"`{weights.name}`: `{_in_file(name, weights)}` has shape {list(shape)}, expected "
                f"{list(parameter.shape)}"
            )
    return model


def size_bytes(model: Any) -> int:
    """Bytes of the weights, those shared by two modules once."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def load_weights(model: Any, weights: Weights, device: torch.device) -> None:
    """Give a model of `build_model` its weights, on the device.

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
