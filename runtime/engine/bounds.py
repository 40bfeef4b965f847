"""Limits of the tokens of a model's answers: grammars, and budgets of reasoning."""

from collections.abc import Collection, Sequence
from functools import cached_property

from lowbit.formats.errors import RequestError
from lowbit.formats.text.template import ChatTemplate
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.text.grammar import Grammar, Grammars
from lowbit.runtime.text.reasoning import CLOSE, OPEN, Begin
from lowbit.runtime.text.strict_calls import StrictCalls
from lowbit.runtime.text.thinking import (
    ThinkingConstraint,
    ThinkingTokens,
    shows_thinking,
    thinking_tokens,
)
from lowbit.runtime.text.tokenizer import Tokenizer


class Bounds:
    """Makes the constraints of requests to one model.

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
        """Nothing is prepared before it is asked for.

        Args:
            tokenizer: of the model.
            template: of the model.
            vocabulary: V, tokens that can be chosen.
            stop_ids: tokens that end an answer.
        """
        self._tokenizer, self._template = tokenizer, template
        self._vocabulary, self._stop_ids = vocabulary, stop_ids
        self.grammars = Grammars(tokenizer, vocabulary, stop_ids)

    @cached_property
    def thinking(self) -> ThinkingTokens | None:
        """Tokens around the reasoning; None for a model without."""
        if self._template is None:
            return None
        if OPEN not in self._template.source and CLOSE not in self._template.source:
            return None
        return thinking_tokens(self._tokenizer, self._template, self._vocabulary, self._stop_ids)

    @cached_property
    def _shows_thinking(self) -> bool:
        """Tell if answers may begin with reasoning although a grammar holds their start."""
        return self._template is not None and shows_thinking(self._template)

    def constraint(
        self,
        ids: Sequence[int],
        begin: Begin,
        budget: int | None,
        grammar: Grammar | StrictCalls | None,
    ) -> Constraint | None:
        """The constraint of one answer.

        Args:
            ids: of the prompt.
            begin: how the output begins.
            budget: tokens of reasoning at most.
            grammar: of the answer behind the reasoning.

        Raises:
            RequestError: a budget below 0.
        """
        if budget is not None and budget < 0:
            raise RequestError(f"`max_thinking_tokens` must be at least 0, got {budget}")
        then = None if grammar is None else grammar.constraint()
        tokens = None if begin == "raw" else self.thinking
        if tokens is None or (budget is None and then is None):
            return then
        held = then is not None and then.unbound == 0
        if begin == "answer" and (
            self._after(ids, tokens.close) is not None  # the prompt has ended the reasoning
            or (held and not self._shows_thinking)
        ):
            return then
        opened = self._after(ids, tokens.open) if begin == "reasoning" else None
        return ThinkingConstraint(begin, tokens, budget, then, opened or b"")

    def _after(self, ids: Sequence[int], mark: int) -> bytes | None:
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
