"""Constraints of answers: how they are made, and the masks that they set.

An error of a constraint ends its request alone.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Ids
from functools import cached_property

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.formats.text.template import ChatTemplate
from lowbit.runtime.engine.sequence import Ended, Sequence
from lowbit.runtime.state.sampler import SamplerRows
from lowbit.runtime.text.answer import CLOSE, OPEN, THINKING_STARTS, OutputStart
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.text.grammar import Grammar, Grammars
from lowbit.runtime.text.strict_calls import StrictCalls
from lowbit.runtime.text.thinking import (
    ThinkingConstraint,
    ThinkingTokens,
    shows_thinking,
    thinking_tokens,
)
from lowbit.runtime.text.tokenizer import Tokenizer


class ConstraintFactory:
    """Factory of constraints for the requests to one model.

    Attributes:
        grammars: over the model's tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        vocabulary: int,
        stop_ids: Collection[int],
    ) -> None:
        """Grammars and reasoning tokens are prepared at their first use."""
        self._tokenizer, self._template = tokenizer, template
        self._vocabulary, self._stop_ids = vocabulary, stop_ids
        self.grammars = Grammars(tokenizer, vocabulary, stop_ids)

    @cached_property
    def thinking(self) -> ThinkingTokens | None:
        """Tokens around the reasoning; None for a model that does not reason."""
        if self._template is None:
            return None
        if OPEN not in self._template.source and CLOSE not in self._template.source:
            return None
        return thinking_tokens(self._tokenizer, self._template, self._vocabulary, self._stop_ids)

    @cached_property
    def _shows_thinking(self) -> bool:
        """True if answers may begin with reasoning although a grammar begins at once."""
        return self._template is not None and shows_thinking(self._template)

    def make(
        self,
        ids: Ids[int],
        begin: OutputStart,
        budget: int | None,
        grammar: Grammar | StrictCalls | None,
    ) -> Constraint | None:
        """Constraint of one answer; None if it is free.

        Args:
            ids: of the prompt.
            begin: kind of text that the output begins with.
            budget: most tokens of reasoning.
            grammar: of the answer behind the reasoning.

        Raises:
            RequestError: a budget below 0.
        """
        if budget is not None and budget < 0:
            raise RequestError(f"`max_thinking_tokens` must be at least 0, got {budget}")
        then = None if grammar is None else grammar.constraint()
        tokens = None if begin in ("raw", "rest") else self.thinking
        if tokens is None or (budget is None and then is None):
            return then
        held = then is not None and then.free_tokens == 0
        if begin == "answer" and (
            self._after(ids, tokens.close) is not None  # the prompt has ended the reasoning
            or (held and not self._shows_thinking)
        ):
            return then
        opened = self._opened(ids, tokens.open) if begin in THINKING_STARTS else b""
        return ThinkingConstraint(begin, tokens, budget, then, opened)

    def _after(self, ids: Ids[int], mark: int) -> bytes | None:
        """Whitespace behind the prompt's last `mark`; None if anything else follows it."""
        text = b""
        for id in reversed(ids):
            if id == mark:
                return text
            more = self._tokenizer.token_bytes(id)
            if more.strip() or id in self._tokenizer.special_ids:
                return None
            text = more + text
        return None

    def _opened(self, ids: Ids[int], mark: int) -> bytes:
        """Text of a prompt behind its last `mark`."""
        place = len(ids) - ids[::-1].index(mark)
        return b"".join(map(self._tokenizer.token_bytes, ids[place:]))


def free_tokens_of(constraint: Constraint | None) -> int:
    """Number of new tokens before the first mask, as far as it is known.

    Raises:
        LowbitError: the constraint failed.
    """
    try:
        return 0 if constraint is None or constraint.done else constraint.free_tokens
    except Exception as error:  # constraints may be foreign objects
        raise explained(error) from error


def restrict(sequences: Iterable[Sequence], sampler: SamplerRows) -> Ended:
    """Set the mask of each constrained sequence; returns those whose constraint failed."""
    failed: Ended = []
    for each in sequences:
        if each.ended:
            continue
        try:
            mask = next_mask(each, sampler.mask.shape[1])
        except LowbitError as error:
            failed.append((each, error))
            continue
        each.masked = mask is not None
        sampler.allow(each.row, mask)
    return failed


def next_mask(sequence: Sequence, words: int) -> Tensor | None:
    """Mask of a sequence's next token; None if it is free. Notes if its constraint is done.

    Raises:
        LowbitError: the constraint failed, gave no such mask, or allows no token.
    """
    constraint: Constraint | None = sequence.request.constraint
    if constraint is None:
        return None
    try:
        sequence.constraint_done, sequence.free_tokens = constraint.done, constraint.free_tokens
        return mask_of(constraint, words)
    except Exception as error:  # constraints may be foreign objects
        raise explained(error) from error


def mask_of(constraint: Constraint, words: int) -> Tensor | None:
    """Mask of the next token; None if every token is allowed.

    Raises:
        Exception: whatever a foreign object does.
        RequestError: the mask has another shape or type, or allows no token.
    """
    mask = None if constraint.done or constraint.free_tokens > 0 else constraint.mask()
    if mask is None:
        return None
    if mask.shape != (words,) or mask.dtype != torch.int32 or mask.is_cuda:
        raise RequestError(
            f"the constraint gave a mask of {tuple(mask.shape)} {mask.dtype} on {mask.device}, "
            f"expected ({words},) torch.int32 on the host"
        )
    if not mask.any():
        raise RequestError("the constraint allows no token")
    return mask


def accept(sequence: Sequence, token: int) -> LowbitError | None:
    """Pass the newest token to the constraint of a sequence; returns the error if it fails."""
    constraint = sequence.request.constraint
    if constraint is None or sequence.constraint_done:
        return None
    try:
        if not constraint.done:  # among the tokens of a round; the next step releases it
            constraint.accept(token)
        sequence.free_tokens = constraint.free_tokens
    except Exception as error:  # constraints may be foreign objects
        return explained(error)
    return None


def explained(error: Exception) -> LowbitError:
    """A constraint's exception as an error for its user."""
    if isinstance(error, LowbitError):
        return error
    return RequestError(f"the constraint failed: {type(error).__name__}: {error}")
