"""A request to continue token ids and to read the output as text, and the limits of an engine."""

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lowbit.formats.errors import RequestError, SettingError, TooLongError
from lowbit.formats.page_counts import EXTRA, PAGE, pages_for
from lowbit.formats.sampling_ranges import LOGPROBS
from lowbit.runtime.engine.span import ImageSpan, check_images
from lowbit.runtime.state.sampling_params import SamplingParams
from lowbit.runtime.text.answer import OutputStart
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.text.tools import CallForm, Tool

if TYPE_CHECKING:
    from lowbit.runtime.engine.runner import Runner


@dataclass(frozen=True, slots=True)
class Request:
    """A request to continue token ids; the engine looks at nothing below `client`.

    Attributes:
        prompt: token ids, at least one.
        sampling: parameters by which tokens are chosen.
        max_new_tokens: at least 1, or 0 with `prompt_logprobs`; None for as many as the context
            holds.
        stop_ids: tokens after which the sequence ends.
        message_ends: tokens that end a message, up to which prefixes are kept.
        constraint: restricts its tokens, and belongs to this request alone; None allows all.
        prompt_logprobs: report the log-probabilities of the prompt's tokens and of this many
            likeliest tokens in their places; None reports none.
        images: images of the prompt, in the order of their tokens.
        salt: hash of what else its keys and values depend on, such as an adapter; prompts of
            unlike salts share no prefix.
        client: who asks; those who wait are served in turn.
        stops: strings that end the text and are left out of it.
        begin: start of the output, see `OutputStart`.
        tools: tools that may be called; without any, nothing is taken for a call.
        form: form of calls.
        parallel: an answer may have several calls.
        calls_in_pieces: calls are given before they are complete.
        count: most new tokens, as `Limits.check` has found; None before it.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int | None = None
    stop_ids: frozenset[int] = frozenset()
    message_ends: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None
    images: tuple[ImageSpan, ...] = ()
    salt: bytes = b""
    client: str = ""
    stops: tuple[str, ...] = ()
    begin: OutputStart = "raw"
    tools: tuple[Tool, ...] = ()
    form: CallForm | None = None
    parallel: bool = True
    calls_in_pieces: bool = False
    count: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine on its requests."""

    context: int  # most tokens of a sequence
    positions: int  # most tokens of a sequence that the model supports
    table_rows: int  # number of token ids that a prompt may have
    hidden: int  # numbers of an embedding
    vocabulary: int  # number of token ids that can be chosen
    pages: int  # of the cache
    images: bool = False  # prompts may have images

    def check(self, request: Request) -> Request:
        """The request with its `count`: as many tokens as it asks for, or as the context holds.

        Raises:
            TooLongError: a prompt longer than the context.
            SettingError: a number of tokens or log-probabilities out of range, or a bias for a
                token that the vocabulary does not have.
            RequestError: an empty prompt, an id outside the vocabulary, images that do not fit or
                that the model does not take, or more tokens than the whole cache holds.
        """
        self.check_prompt(request.prompt)
        self.check_images(request.images, len(request.prompt))
        for id, _ in request.sampling.logit_bias:
            if id >= self.vocabulary:
                raise SettingError(
                    "logit_bias", f"must name tokens from 0 to {self.vocabulary - 1}, got {id}"
                )
        asked, scored = request.max_new_tokens, request.prompt_logprobs
        if scored is not None and not LOGPROBS.allows(scored):
            raise SettingError("prompt_logprobs", f"must be {LOGPROBS.expected}, got {scored}")
        least = 1 if scored is None else 0
        if asked is not None and asked < least:
            raise SettingError("max_new_tokens", f"must be at least {least}, got {asked}")
        room = self.context - len(request.prompt) + 1  # the last new token takes no place
        count = room if asked is None else min(asked, room)
        pages = pages_needed(len(request.prompt), count)
        if pages > self.pages:
            raise RequestError(
                f"the request may take {pages * PAGE} tokens of the cache, which has "
                f"{self.pages * PAGE}",
                hint="ask for fewer new tokens or a larger cache",
            )
        return replace(request, count=count)

    def check_prompt(self, ids: Ids[int], start: int = 0) -> None:
        """Check the token ids of a prompt, and that `start` is the index of one.

        Raises:
            TooLongError, RequestError: see `check`.
        """
        if not ids:
            raise RequestError("the prompt is empty", hint="give at least one token")
        if len(ids) > self.context:
            raise TooLongError(
                f"the prompt has {len(ids)} tokens, the context is {self.context}",
                hint=f"shorten the prompt{self.advice(len(ids), ', or ')}",
            )
        if min(ids) < 0 or max(ids) >= self.table_rows:
            raise RequestError(f"token ids must be between 0 and {self.table_rows - 1}")
        if not 0 <= start < len(ids):
            raise RequestError(f"the sequence has {len(ids)} tokens, none is number {start}")

    def check_images(self, images: tuple[ImageSpan, ...], tokens: int) -> None:
        """Check the images of a prompt of so many tokens.

        Raises:
            RequestError: see `check`.
        """
        if images and not self.images:
            raise RequestError(
                f"the model takes no images, the prompt has {len(images)}",
                hint="models of Qwen3.5 take images",
            )
        check_images(images, tokens, self.hidden)

    def advice(self, tokens: int, before: str = "") -> str:
        """Hint to ask for a larger --context; empty if the model has too few positions."""
        return f"{before}ask for a larger --context" if tokens <= self.positions else ""


def pages_needed(prompt: int, count: int) -> int:
    """Pages for a prompt and `count` new tokens, the last of which has no keys and values."""
    return pages_for(prompt + max(count - 1, 0))


def limits_of(runner: "Runner") -> Limits:
    """Sizes that requests to a runner must fit."""
    config = runner.decoder.config
    return Limits(
        context=runner.context,
        positions=config.max_position_embeddings,
        table_rows=config.vocab_size,
        hidden=config.hidden_size,
        vocabulary=runner.sampler.vocabulary,
        pages=runner.state.pages.count - EXTRA,
        images=config.rope_sections is not None,
    )
