"""The Python API: a loaded model that generates, streams and gives logits."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, Unpack, cast, overload

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError, RequestError, ResourceError
from lowbit.formats.generation import load_generation_config
from lowbit.formats.layout.recipes import GROUP_SIZE, Base
from lowbit.formats.layout.rtn import ScaleRule
from lowbit.formats.text.length import TooLongError
from lowbit.formats.text.template import ChatTemplate, load_chat_template
from lowbit.runtime.engine.bounds import Bounds
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.input_power import Method, calibration_ids, check_searched, input_power
from lowbit.runtime.engine.many import answer_all
from lowbit.runtime.engine.memory import CacheSize, choose_cache
from lowbit.runtime.engine.runner import new_runner
from lowbit.runtime.engine.sequence import TokenLogProbabilities, TokenRequest
from lowbit.runtime.engine.stream import Generation, Request, Stream
from lowbit.runtime.models.loader import OpenedModel, load_decoder, open_model
from lowbit.runtime.speculation.settings import Mode, Speculation
from lowbit.runtime.state.sampling import SamplingParams, sampling_defaults
from lowbit.runtime.text.chat import Message, render_prompt
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.text.grammar import Grammar, Grammars
from lowbit.runtime.text.reasoning import Begin, begin_of
from lowbit.runtime.text.tokenizer import Tokenizer, load_tokenizer


class Options(TypedDict, total=False):
    """Keywords of a request to a model.

    Attributes:
        sampling: None for the model's own defaults; `dataclasses.replace(model.defaults,
            temperature=0.8)` changes one of them.
        max_new_tokens: None for as many as the context holds.
        stop: strings that end the text and are left out of it.
        raw: see `Model.encode`.
        max_thinking_tokens: reasoning is ended behind so many tokens, and the answer begins; None
            leaves it to the model. A model without reasoning has none to end.
        grammar: of the answer, not of the reasoning; see `Model.grammars`.
    """

    sampling: SamplingParams | None
    max_new_tokens: int | None
    stop: Sequence[str]
    raw: bool
    max_thinking_tokens: int | None
    grammar: Grammar | None


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model; its requests may come from several threads and run together.

    Attributes:
        bounds: makes the constraints of its requests.
        cache: what there is room for.
        defaults: sampling parameters of the model's generation_config.json.
        stop_ids: tokens that end a text.
        load_s: seconds that loading took.
        quantized_at_load: recipe by which the weights were quantized as they were read, if any.
    """

    folder: Path
    opened: OpenedModel = field(repr=False)
    engine: Engine = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    template: ChatTemplate | None = field(repr=False)
    bounds: Bounds = field(repr=False)
    defaults: SamplingParams
    stop_ids: frozenset[int]
    device: str
    dtype: torch.dtype
    load_s: float
    cache: CacheSize
    quantized_at_load: Base | None = None

    @property
    def context(self) -> int:
        """Tokens that prompt and output may have together."""
        return self.engine.context

    @property
    def grammars(self) -> Grammars:
        """Makes grammars, for `grammar` of a request."""
        return self.bounds.grammars

    def encode(
        self,
        prompt: str | Sequence[Message],
        *,
        thinking: bool | None = None,
        raw: bool = False,
    ) -> list[int]:
        """Token ids of a prompt: one user message, or a conversation, through the chat template.

        Args:
            prompt: text, or messages with `role` and `content`.
            thinking: switches a reasoning model's thinking; None leaves it to its template.
            raw: take the text as it is, without the template; the output is not split either.

        Raises:
            RequestError: a bad message, a prompt much longer than the context, or no template to
                render it with.
            CheckpointError: the tokenizer gives ids that the model has no embedding for.
        """
        try:
            text = self._text_of(prompt, thinking, raw)
            ids = self.tokenizer.encode(text, framed=raw, context=self.context)
        except TooLongError as error:
            advice = self.engine.advice(self.context + 1, ", or ")
            raise RequestError(str(error), hint=f"{error.hint}{advice}") from None
        self.tokenizer.text.check_ids(ids, self.opened.config.vocab_size)
        return ids

    def _text_of(self, prompt: str | Sequence[Message], thinking: bool | None, raw: bool) -> str:
        """The text of a prompt; arguments and errors as in `encode`."""
        if raw:
            if not isinstance(prompt, str):
                raise RequestError("a raw prompt must be text, got messages")
            return prompt
        if self.template is None:
            raise RequestError(
                f"`{self.folder}` has no chat template", hint="use --raw (raw=True in Python)"
            )
        messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        max_bytes = self.tokenizer.max_bytes(self.context)
        return render_prompt(self.template, messages, thinking, max_bytes)

    def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        thinking: bool | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Text piece by piece; `Stream.generation` has the rest when it has ended.

        Args:
            prompt: see `encode`.
            thinking: see `encode`.
            options: see `Options`.

        Raises:
            RequestError: see `encode` and `stream_ids`.
        """
        ids = self.encode(prompt, thinking=thinking, raw=options.get("raw", False))
        return self.stream_ids(ids, **options)

    def stream_ids(self, ids: Sequence[int], **options: Unpack[Options]) -> Stream:
        """Text piece by piece after a prompt that `encode` has made.

        Raises:
            RequestError: a prompt longer than the context, no room for a token, an empty stop
                string, or a negative `max_thinking_tokens`.
        """
        return Stream(self.engine, self.tokenizer, self.request(ids, **options))

    def request(
        self,
        ids: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        raw: bool = False,
        max_thinking_tokens: int | None = None,
        grammar: Grammar | None = None,
        constraint: Constraint | None = None,
    ) -> Request:
        """A checked request; arguments and errors as in `stream_ids`.

        constraint: of the whole output, in place of a grammar and a limit of the reasoning; made
        for this request alone.
        """
        if constraint is not None and (grammar is not None or max_thinking_tokens is not None):
            raise RequestError("`constraint` excludes `grammar` and `max_thinking_tokens`")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise RequestError(f"`max_new_tokens` must be at least 1, got {max_new_tokens}")
        if not all(stop):
            raise RequestError("a stop string is empty")
        self.engine.check(ids)
        begin: Begin = "raw" if raw else begin_of(ids, self.tokenizer)
        if constraint is None:
            constraint = self.bounds.constraint(ids, begin, max_thinking_tokens, grammar)
        return Request(
            prompt=tuple(ids),
            sampling=sampling or self.defaults,
            max_new_tokens=max_new_tokens,
            stop_ids=self.stop_ids,
            stops=tuple(stop),
            begin=begin,
            constraint=constraint,
        )

    @overload
    def generate(  # type: ignore[overload-overlap]  # text is a sequence of texts, too
        self,
        prompt: str | Sequence[Message],
        *,
        thinking: bool | None = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[Message]],
        *,
        thinking: bool | None = None,
        **options: Unpack[Options],
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: str | Sequence[Message] | Sequence[str] | Sequence[Sequence[Message]],
        *,
        thinking: bool | None = None,
        **options: Unpack[Options],
    ) -> Generation | list[Generation]:
        """The whole text of a request; of a list of prompts all texts, decoded together.

        Arguments and errors as in `stream`; of several requests the first error is raised when all
        have ended.
        """
        many = not isinstance(prompt, str) and bool(prompt) and not isinstance(prompt[0], Mapping)
        prompts = cast("Sequence[str | Sequence[Message]]", prompt if many else [prompt])
        raw = options.get("raw", False)
        requests = [
            self.request(self.encode(each, thinking=thinking, raw=raw), **options)
            for each in prompts
        ]
        results = dict(answer_all(self.engine, self.tokenizer, requests))
        made = [results[number] for number in range(len(requests))]
        for result in made:
            if isinstance(result, LowbitError):
                raise result
        done = cast("list[Generation]", made)
        return done if many else done[0]

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits after every token of a sequence: [T, V] float32 on the model's device."""
        return self.engine.logits(ids)

    def score(self, ids: Sequence[int], top: int = 0) -> list[TokenLogProbabilities | None]:
        """Log-probability of every token of a sequence behind those before it.

        Others run beside it, and memory for logits does not grow with the sequence.

        Args:
            ids: of the sequence.
            top: likeliest tokens to report in each place.

        Returns:
            As many as there are ids; None for the first, which follows nothing.

        Raises:
            RequestError: empty, longer than the context, an id outside the vocabulary, or `top`
                out of range.
            CheckpointError: logits are NaN or infinite.
        """
        request = TokenRequest(tuple(ids), max_new_tokens=0, prompt_logprobs=top)
        handle = self.engine.submit(request)
        handle.result()
        return list(handle.prompt_log_probabilities)


def load(
    folder: str | Path,
    *,
    device: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    context: int | None = None,
    max_sequences: int = 4,
    cache_tokens: int | None = None,
    quantize: Base | None = None,
    group_size: int = GROUP_SIZE,
    method: Method = "rtn",
    max_waiting: int | None = None,
    speculate: Mode = "off",
    draft_tokens: int | None = None,
) -> Model:
    """Load a packed checkpoint folder (a plain BF16 one works too).

    Args:
        folder: with config.json, safetensors and tokenizer.json.
        device: `cpu` or `cuda`; None takes a GPU if there is one.
        dtype: of activations and dense weights. float32, on the CPU only, is the checked mode:
            exact dequantized weights.
        context: tokens of prompt and output; None for min(max_position, 8192, what fits).
        max_sequences: requests that are decoded together; others wait.
        cache_tokens: of all requests together, and of conversations that are kept; None for
            `max_sequences` times `context`, or what fits.
        quantize: recipe (int4, int8, mixed) for a BF16, F16 or F32 checkpoint: quantized as it is
            read, with the codes and scales that lowbit-convert writes.
        group_size: weights that share a scale, with `quantize`; where it does not divide a row, the
            next smaller one of 32, 64, 128, 256 that does.
        method: how scales are chosen, with `quantize`: `rtn` searches for the least error,
            `weighted` weights it by the input's power on a bundled text, which runs through the
            original first, and `absmax` does not search.
        max_waiting: requests that may wait beside those that are decoded together; a further one
            is refused. None for any number.
        speculate: what proposes tokens that a step checks together: `off`, or `ngram`, which copies
            what followed the same tokens before. The output does not depend on it.
        draft_tokens: of a step at most; None for as many as suit the model.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
        FormatError: a packed file that breaks SPEC.md or uses a scheme that cannot be served.
        UnsupportedModelError: the architecture, or a feature of it, is not implemented.
        QuantizationError: `quantize` for a checkpoint that is quantized already or has NaN, or a
            recipe that does not fit it.
        ResourceError: no GPU, or too little memory.
        RequestError: a context or dtype that the model or device does not have, a negative
            `max_waiting`, or an unknown `speculate` or number of drafts.
    """
    if max_waiting is not None and max_waiting < 0:
        raise RequestError(f"`max_waiting` must be at least 0, got {max_waiting}")
    speculation = Speculation(speculate, draft_tokens)
    started = time.perf_counter()
    folder = Path(folder)
    rule: ScaleRule = "absmax" if method == "absmax" else "signed"
    opened = open_model(folder, quantize, group_size, rule)
    weighted = quantize is not None and method == "weighted"
    if weighted:
        check_searched(opened)
    generation = load_generation_config(folder, opened.config.vocab_size)
    config_stops = generation.eos_token_ids or opened.config.eos_token_ids
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder)
    if template is not None:
        template.prepare()  # while the weights are read
    device = choose_device(device)
    if dtype not in (torch.bfloat16, torch.float32):
        raise RequestError(f"dtype must be bfloat16 or float32, got {dtype}")
    if dtype == torch.float32 and device != "cpu":
        raise RequestError("float32 runs on the CPU only", hint="use device='cpu'")
    drafts = speculation.most_drafts(recurrent=opened.config.linear_layers is not None)
    cache = choose_cache(opened, device, dtype, context, max_sequences, cache_tokens, drafts)
    if weighted:
        power = _measured_power(folder, tokenizer, device, dtype)
        opened = open_model(folder, quantize, group_size, rule, power)
    decoder = load_decoder(opened, device, dtype, cache.context)
    vocabulary = min(tokenizer.vocabulary, opened.config.vocab_size)
    runner = new_runner(decoder, vocabulary, cache, dtype, device)
    engine = Engine(runner, max_waiting, speculation.new_drafter(device), drafts)
    stop_ids = frozenset((*config_stops, *tokenizer.stop_ids()))
    if device != "cpu":
        torch.cuda.synchronize()
    return Model(
        folder=folder,
        opened=opened,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        bounds=Bounds(tokenizer, template, vocabulary, stop_ids),
        defaults=sampling_defaults(generation),
        stop_ids=stop_ids,
        device=device,
        dtype=dtype,
        load_s=time.perf_counter() - started,
        cache=cache,
        quantized_at_load=quantize,
    )


def _measured_power(
    folder: Path, tokenizer: Tokenizer, device: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Power of every linear's input channels on the bundled text; see `input_power`."""
    original = open_model(folder)
    return input_power(original, calibration_ids(tokenizer, original), device, dtype)


def choose_device(device: str | None) -> str:
    """`cpu` or `cuda`: what was asked for if it is there, else a GPU if there is one.

    Raises:
        RequestError: another name.
        ResourceError: a GPU was asked for and there is none.
    """
    if device not in (None, "cpu", "cuda"):
        raise RequestError(f"device must be cpu or cuda, got `{device}`")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ResourceError("no CUDA device was found", hint="use --device cpu")
    return device or ("cuda" if available else "cpu")
