"""Prompts: texts and conversations as the token ids of one model."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.formats.errors import RequestError, TooLongError
from lowbit.formats.text.template import ChatTemplate
from lowbit.formats.text.tokenizer import MarkedText
from lowbit.formats.text.worker import Ask, blocking
from lowbit.runtime.engine.image_input import EncodedPrompt, ImageInput, PictureEmbedder, place
from lowbit.runtime.engine.request import Limits
from lowbit.runtime.images.known import KnownPictures
from lowbit.runtime.images.picture import Picture, PictureReader
from lowbit.runtime.text.chat import (
    Message,
    has_late_system,
    one_system_message,
    render_prompt_later,
)
from lowbit.runtime.text.images import has_images, pictures_of, with_pictures
from lowbit.runtime.text.last_turn import PromptEnd
from lowbit.runtime.text.tokenizer import ControlTokens, Tokenizer
from lowbit.runtime.text.tools import Tool

if TYPE_CHECKING:
    from torch import Tensor


class EmbedderElsewhere:
    """Embedder where there is no tower: another process has it."""

    def is_made(self, picture: Picture) -> bool:
        """Refuse."""
        raise RuntimeError("this process has no vision tower")

    def prepare(self, picture: Picture) -> "Future[Any] | None":
        """Refuse."""
        raise RuntimeError("this process has no vision tower")

    def pieces(self, picture: Picture) -> "Iterator[Tensor | Future[Any] | None]":
        """Refuse."""
        raise RuntimeError("this process has no vision tower")


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Encoder of texts and conversations, which needs no weights.

    Attributes:
        folder: of the model.
        template: chat template; None for a model without.
        limits: of the engine.
        allow_control_tokens: see `LoadOptions`.
        refuse_late_system: see `LoadOptions`.
        images: how images become tokens; None for a model that takes none.
        no_images: why it takes none.
        embedder: makes the embeddings of pictures.
        known: images that have been decoded.
    """

    folder: Path
    tokenizer: Tokenizer = field(repr=False)
    template: ChatTemplate | None = field(repr=False)
    limits: Limits
    allow_control_tokens: bool = False
    refuse_late_system: bool = False
    images: ImageInput | None = None
    no_images: str = ""
    embedder: PictureEmbedder = field(default_factory=EmbedderElsewhere, repr=False)
    known: KnownPictures = field(default_factory=KnownPictures, compare=False, repr=False)

    @property
    def control(self) -> ControlTokens | None:
        """Control tokens that messages cannot contain; None if they may."""
        return None if self.allow_control_tokens else self.tokenizer.control

    async def encode_prompt_later(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        thinking: bool | None = None,
        raw: bool = False,
        tools: Sequence[Tool] = (),
        template_arguments: Mapping[str, Any] | None = None,
        ask: Ask | None = None,
        end: PromptEnd = "next",
    ) -> EncodedPrompt:
        """A prompt of tokens: one user message, or a conversation, through the chat template.

        Control tokens that a message spells, such as `<|im_end|>`, are plain text, unless
        `allow_control_tokens` was given to `load`; in a raw prompt they are what they spell.

        Args:
            prompt: text, or messages with `role` and `content`, which may have images: see
                `runtime.text.images`.
            thinking: switches a reasoning model's thinking; None leaves it to its template.
            raw: take the text as it is, without the template; the output is not split either.
            tools: functions that the model may call.
            template_arguments: further arguments of the template, plain JSON.
            ask: see `ChatTemplate.render_later`.
            end: where the prompt of a conversation ends.

        Raises:
            RequestError: a bad message, a prompt much longer than the context, no template to
                render it with, an image that cannot be read, or one for a model that takes none.
            CheckpointError: the tokenizer gives ids that the model has no embedding for.
        """
        pictures: list[Picture] = []
        left_out: tuple[str, ...] = ()
        if not isinstance(prompt, str) and has_images(prompt):
            prompt = with_pictures(prompt, self.reader())
            pictures += pictures_of(prompt)
        try:
            text: str | MarkedText
            self._check_pictures(pictures)
            if not raw:
                text, left_out = await self._rendered(
                    prompt, thinking, tools, template_arguments, ask, end
                )
            elif isinstance(prompt, str):
                text = prompt
            else:
                raise RequestError("a raw prompt must be text, got messages")
            ids = self.tokenizer.encode(text, framed=raw, context=self.limits.context)
        except TooLongError as error:
            advice = self.limits.advice(self.limits.context + 1, ", or ")
            raise TooLongError(str(error), hint=f"{error.hint}{advice}") from None
        self.tokenizer.text.check_ids(ids, self.limits.table_rows)
        if self.images is None or not pictures:
            return EncodedPrompt(ids, left_out=left_out)
        placed = place(ids, pictures, self.images.token, self.embedder)
        return replace(placed, left_out=left_out)

    encode_prompt = blocking(encode_prompt_later)

    def encode(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        thinking: bool | None = None,
        raw: bool = False,
        tools: Sequence[Tool] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of `encode_prompt`, without its images."""
        return self.encode_prompt(
            prompt,
            thinking=thinking,
            raw=raw,
            tools=tools,
            template_arguments=template_arguments,
        ).ids

    def _check_pictures(self, pictures: Sequence[Picture]) -> None:
        """Refuse more than the context holds before a list of their tokens is made.

        Raises:
            TooLongError: they have more tokens.
        """
        tokens = sum(each.rows * each.columns for each in pictures)
        if tokens > self.limits.context:
            raise TooLongError(
                f"the prompt's images take {tokens} tokens, the context is {self.limits.context}"
            )

    def reader(self) -> PictureReader:
        """A reader of the images of one prompt.

        Raises:
            RequestError: the model takes none.
        """
        if self.images is None:
            raise RequestError(
                f"the model takes no images: {self.no_images}",
                hint="images need a Qwen3.5 with its vision tower, converted without --drop-vision",
            )
        sends = isinstance(self.embedder, EmbedderElsewhere)
        return PictureReader(self.images.settings, self.known, sends)

    async def _rendered(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        thinking: bool | None,
        tools: Sequence[Tool],
        template_arguments: Mapping[str, Any] | None,
        ask: Ask | None,
        end: PromptEnd,
    ) -> tuple[MarkedText, tuple[str, ...]]:
        """The text of a prompt by the chat template, and names of what has another form in it.

        Arguments and errors as in `encode_prompt_later`.
        """
        if self.template is None:
            raise RequestError(
                f"`{self.folder}` has no chat template", hint="use --raw (raw=True in Python)"
            )
        render = partial(
            render_prompt_later,
            self.template,
            thinking=thinking,
            max_bytes=self.tokenizer.max_bytes(self.limits.context),
            control=self.control,
            tools=tools,
            template_arguments=template_arguments,
            ask=ask,
            end=end,
        )
        if isinstance(prompt, str):
            return await render([Message(role="user", content=prompt)]), ()
        try:
            return await render(prompt), ()
        except TooLongError:
            raise
        except RequestError:
            if self.refuse_late_system or not has_late_system(prompt):
                raise
        return await render(one_system_message(prompt)), ("place of system messages",)
