"""The Python API: a loaded model generates text, streams it and returns logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.formats.text.template import ChatTemplate
from lowbit.runtime.engine.constraints import ConstraintFactory
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.image_input import EncodedPrompt
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.memory import ChosenSequences, ChosenType
from lowbit.runtime.engine.parallel.crew import Crew
from lowbit.runtime.engine.prompts import PromptEncoder
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.engine.span import ImageSpan
from lowbit.runtime.engine.stream import Generation, Stream, answer_all
from lowbit.runtime.engine.vision import Vision
from lowbit.runtime.models.loader import OpenedModel
from lowbit.runtime.state.device_state import CacheSize
from lowbit.runtime.state.sampling_params import SamplingParams
from lowbit.runtime.text.chat import Message, output_start
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.text.grammar import Grammar, Grammars
from lowbit.runtime.text.tokenizer import Tokenizer
from lowbit.runtime.text.tools import Tool

if TYPE_CHECKING:
    from lowbit.runtime.kernels.launch.tuned import Launches


class Options(TypedDict, total=False):
    """Keywords of a request to a model.

    Attributes:
        sampling: None for the model's own defaults; `dataclasses.replace(model.defaults,
            temperature=0.8)` changes one of them.
        max_new_tokens: None for as many as the context holds.
        stop: strings that end the text and are left out of it.
        raw: see `Model.encode`.
        max_thinking_tokens: most tokens of reasoning before the answer begins; None for any number.
            Ignored by models that do not reason.
        grammar: restricts the answer, not the reasoning; see `Model.grammars`.
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
        constraints: factory of constraints.
        cache: size of the cache.
        sequences: that are decoded together, and why so many where memory has decided.
        kv_cache: type of its keys and values.
        defaults: sampling parameters of the model's generation_config.json.
        stop_ids: tokens that end a text.
        options: that it was loaded with; `device` and `dtype` below are the chosen ones.
        load_s: seconds that loading took.
        launches: of kernels, as `lowbit-run tune` measured them on this GPU; None for the bundled
            tables alone.
        vision: tower that reads images; None for a model that takes none.
        no_vision: why it takes none.
        crew: the other processes that share the model; None without any.
    """

    folder: Path
    options: LoadOptions
    opened: OpenedModel = field(repr=False)
    engine: Engine = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    template: ChatTemplate | None = field(repr=False)
    constraints: ConstraintFactory = field(repr=False)
    defaults: SamplingParams
    stop_ids: frozenset[int]
    device: str
    dtype: torch.dtype
    load_s: float
    cache: CacheSize
    sequences: ChosenSequences
    kv_cache: ChosenType
    launches: "Launches | None" = field(default=None, repr=False)
    vision: Vision | None = field(default=None, repr=False)
    no_vision: str = field(default="", repr=False)
    crew: Crew | None = field(default=None, repr=False)

    def close(self) -> None:
        """End the other processes of a model that has some, which answers no more.

        They also end with the last reference to the model, and with this process.
        """
        if self.crew is not None:
            self.crew.close()

    @property
    def context(self) -> int:
        """Most tokens of prompt and output together."""
        return self.engine.limits.context

    @property
    def prompts(self) -> PromptEncoder:
        """Encoder of prompts."""
        found = PromptEncoder(
            self.folder,
            self.tokenizer,
            self.template,
            self.engine.limits,
            self.options.allow_control_tokens,
            self.options.refuse_late_system,
            no_images=self.no_vision,
        )
        if (vision := self.vision) is None:
            return found
        return replace(found, images=vision.input, embedder=vision, known=vision.known)

    @property
    def grammars(self) -> Grammars:
        """Factory of grammars, for `grammar` of a request."""
        return self.constraints.grammars

    def encode(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        thinking: bool | None = None,
        raw: bool = False,
        tools: Sequence[Tool] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a prompt: one user message, or a conversation, through the chat template.

        Arguments and errors as in `PromptEncoder.encode_prompt`.
        """
        return self.prompts.encode(
            prompt,
            thinking=thinking,
            raw=raw,
            tools=tools,
            template_arguments=template_arguments,
        )

    def encode_prompt(
        self, prompt: str | Sequence[Mapping[str, Any]], thinking: bool | None, raw: bool = False
    ) -> EncodedPrompt:
        """Token ids of a prompt, as `encode` gives them, and its images."""
        return self.prompts.encode_prompt(prompt, thinking=thinking, raw=raw)

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
        made = self.encode_prompt(prompt, thinking, options.get("raw", False))
        return self.stream_ids(made.ids, images=made.images, **options)

    def stream_ids(
        self, ids: Sequence[int], *, images: Sequence[ImageSpan] = (), **options: Unpack[Options]
    ) -> Stream:
        """Text piece by piece after a prompt that `encode` has made.

        images: of the prompt; their tokens stand in `ids`, whatever these are.

        Raises:
            RequestError: a prompt longer than the context, no room for a token, images that do not
                fit, an empty stop string, or a negative `max_thinking_tokens`.
        """
        request = self.request(ids, images=images, **options)
        return Stream(self.engine, self.tokenizer, request)

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
        images: Sequence[ImageSpan] = (),
    ) -> Request:
        """A checked request; arguments and errors as in `stream_ids`.

        constraint: limits the whole output, in place of a grammar and a limit of the reasoning;
        made for this request alone.
        """
        if constraint is not None and (grammar is not None or max_thinking_tokens is not None):
            raise RequestError("`constraint` excludes `grammar` and `max_thinking_tokens`")
        if not all(stop):
            raise RequestError("a stop string is empty")
        request = Request(
            prompt=tuple(ids),
            sampling=sampling or self.defaults,
            max_new_tokens=max_new_tokens,
            stop_ids=self.stop_ids,
            message_ends=self.stop_ids,
            images=tuple(images),
            stops=tuple(stop),
            begin="raw" if raw else output_start(ids, self.tokenizer),
        )
        request = self.engine.limits.check(request)
        if constraint is None:
            constraint = self.constraints.make(ids, request.begin, max_thinking_tokens, grammar)
        return replace(request, constraint=constraint)

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
        encoded = [self.encode_prompt(each, thinking, raw) for each in prompts]
        requests = [self.request(each.ids, images=each.images, **options) for each in encoded]
        results = dict(answer_all(self.engine, self.tokenizer, requests))
        made = [results[number] for number in range(len(requests))]
        for result in made:
            if isinstance(result, LowbitError):
                raise result
        done = cast("list[Generation]", made)
        return done if many else done[0]

    def logits(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> Tensor:
        """Logits after every token of a sequence: [T, V] float32 on the model's device."""
        return self.engine.logits(ids, images=tuple(images))

    def score(self, ids: Sequence[int], top: int = 0) -> list[TokenLogProbabilities | None]:
        """Log-probability of every token of a sequence behind those before it.

        Others run beside it, and memory for logits does not grow with the sequence.

        Args:
            ids: token ids of the sequence.
            top: number of likeliest tokens to report in each place.

        Returns:
            As many as there are ids; None for the first, which follows nothing.

        Raises:
            RequestError: empty, longer than the context, an id outside the vocabulary, or `top`
                out of range.
            CheckpointError: logits are NaN or infinite.
        """
        request = Request(tuple(ids), max_new_tokens=0, prompt_logprobs=top)
        handle = self.engine.submit(request)
        handle.result()
        return list(handle.prompt_log_probabilities)
