"""A limit on reasoning, and a constraint that begins behind it."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lowbit.formats.errors import RequestError
from lowbit.formats.text.template import ChatTemplate
from lowbit.runtime.text.answer import CLOSE, OPEN, OutputStart
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.text.tokenizer import Tokenizer

# Where an output is. first: before its first token, which may open a block; forced: in the tokens
# that end the block.
Place = Literal["first", "reasoning", "forced", "answer"]
USUAL = f"\n{CLOSE}\n\n"  # Qwen's
THOUGHT, ANSWER = "thought-7", "answer-7"  # parts of a conversation that a template shows its way


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    """Tokens around the reasoning of one model."""

    tokenizer: Tokenizer
    open: int  # id that begins a block
    close: int  # id that ends it
    line: tuple[int, ...]  # ids of a line feed
    before: tuple[int, ...]  # ids between the last line of the reasoning and `close`
    behind: tuple[int, ...]  # ids between `close` and the answer
    vocabulary: int  # V, tokens that can be chosen
    stop_ids: tuple[int, ...]  # tokens that end an output

    @property
    def words(self) -> int:
        """Words of a mask."""
        return -(-self.vocabulary // 32)


def thinking_tokens(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    vocabulary: int,
    stop_ids: Collection[int],
) -> ThinkingTokens | None:
    """Tokens around the reasoning, with the line feeds of the model's template.

    Returns:
        None for a model that has no such tokens.
    """
    opening, closing = tokenizer.token_id(OPEN), tokenizer.token_id(CLOSE)
    if opening is None or closing is None or max(opening, closing) >= vocabulary:
        return None
    before, _, behind = _closing(template).partition(CLOSE)
    return ThinkingTokens(
        tokenizer=tokenizer,
        open=opening,
        close=closing,
        line=tuple(tokenizer.encode("\n")),
        before=tuple(tokenizer.encode(before)) if before else (),
        behind=tuple(tokenizer.encode(behind)) if behind else (),
        vocabulary=vocabulary,
        stop_ids=tuple(sorted(id for id in stop_ids if id < vocabulary)),
    )


def _closing(template: ChatTemplate | None) -> str:
    """Text between reasoning and answer as a template writes it; Qwen's where it leaves it out."""
    if template is None:
        return USUAL
    answer = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    try:
        text = template.render([{"role": "user", "content": "Hi"}, answer], answer=False)
    except RequestError:  # it has no place for an answer
        return USUAL
    _, _, rest = text.partition(THOUGHT)
    between, _, _ = rest.partition(ANSWER)
    known = between.strip() == CLOSE and rest != between
    return between if known else USUAL


def shows_thinking(template: ChatTemplate) -> bool:
    """True if a template has a place for reasoning: it writes it, takes it out, or begins it.

    One that only writes an empty block where thinking is switched off has none: its model may
    answer at once. A template that cannot be asked has a place if it names the tags.
    """
    if OPEN not in template.source and CLOSE not in template.source:
        return False
    user = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": ANSWER}
    block = f"{OPEN}\n{THOUGHT}\n{CLOSE}\n\n{ANSWER}"
    try:
        written = template.render([user, {**answer, "reasoning_content": THOUGHT}], answer=False)
        kept = template.render([user, {**answer, "content": block}, user], answer=False)
        begun = template.render([user])
    except RequestError:
        return True
    return THOUGHT in written or block not in kept or begun.rstrip().endswith(OPEN)


class ThinkingConstraint:
    """Ends the reasoning of one output, and leaves the answer to another constraint."""

    def __init__(
        self,
        begin: OutputStart,
        tokens: ThinkingTokens,
        budget: int | None,
        then: Constraint | None,
        opened: bytes = b"",
    ) -> None:
        """Start before the first token.

        Args:
            begin: start of the output; `raw` has no reasoning.
            budget: tokens of reasoning, those around it not counted, behind which it is ended;
                None never ends it.
            then: applies to the answer; where it limits the first token, a stop id does not come
                before.
            opened: text of the prompt behind the token that has opened the block.
        """
        self._tokens, self._budget, self._then = tokens, budget, then
        self._holds_start = then is not None and then.free_tokens == 0  # of the answer
        places: dict[OutputStart, Place] = {
            "raw": "answer",
            "answer": "first",
            "reasoning": "reasoning",
            "rest": "answer",
            "rest of reasoning": "reasoning",
        }
        self._place: Place = places[begin]
        self._last = b""  # byte of the block
        self._blank = True  # so far
        self._count = 0
        self._forced: list[int] = []
        self._words = torch.zeros(tokens.words, dtype=torch.int32)
        if self._place == "reasoning":
            self._think(opened)

    @property
    def done(self) -> bool:
        """True once the answer has begun and nothing limits it."""
        return self._place == "answer" and (self._then is None or self._then.done)

    @property
    def free_tokens(self) -> int:
        """Tokens left of the budget, and those that the answer has free; see `Constraint`."""
        free = 0 if self._then is None else self._then.free_tokens
        if self._place == "answer":
            return free
        if self._holds_start or self._place == "forced":
            return 0
        if self._budget is None:
            return free
        left = self._budget - self._count + (self._place == "first")
        return left if self._then is None else min(left, free)

    def mask(self) -> Tensor | None:
        """Tokens that may come next; see `Constraint`."""
        if self._place == "forced":
            return self._set(0, [self._forced[0]], True)
        if self._then is None or not (self._holds_start or self._place == "answer"):
            return None
        if self._place == "reasoning":
            return self._set(-1, self._tokens.stop_ids, False)
        mask = self._then.mask()
        if mask is None or self._place == "answer":
            return mask
        self._words.copy_(mask)
        return self._set(None, [self._tokens.open], True)

    def accept(self, token: int) -> None:
        """Go on behind a token; see `Constraint`."""
        tokens = self._tokens
        if self._place == "forced":
            self._forced.pop(0)
            self._place = "forced" if self._forced else "answer"
        elif self._place == "first" and token == tokens.open:
            self._place = "reasoning"
            self._think(b"")
        elif self._place == "reasoning" and token == tokens.close:
            self._force(tokens.behind if self._holds_start else ())
        elif self._place == "reasoning":
            self._count += 1
            self._think(tokens.tokenizer.token_bytes(token))
        else:
            self._place = "answer"
            if self._then is not None:
                self._then.accept(token)

    def copy(self) -> "ThinkingConstraint | None":
        """Another one in the same state; None if the answer's constraint cannot be copied."""
        then = None if self._then is None else self._then.copy()
        if then is None and self._then is not None:
            return None
        other = copy.copy(self)
        other._then, other._forced = then, list(self._forced)
        other._words = torch.zeros_like(self._words)
        return other

    def forced(self, most: int) -> Sequence[int]:
        """Tokens that end the block, or that the answer has next; see `Constraint`."""
        if self._place == "forced":
            return self._forced[:most]
        if self._place != "answer" or self._then is None or self._then.done:
            return ()
        return self._then.forced(most)

    def _think(self, text: bytes) -> None:
        """Take more of the block; end it as the template does where the budget is spent."""
        self._last = text[-1:] or self._last
        self._blank = self._blank and not text.strip()
        if self._budget is None or self._count < self._budget:
            return
        tokens = self._tokens
        ids: tuple[int, ...] = tokens.before
        if not self._last:  # not even the line feed behind the opening
            ids = (*tokens.line, *tokens.before)
        elif self._last == b"\n" and not self._blank:
            ids = ()
        self._force((*ids, tokens.close, *tokens.behind))

    def _force(self, ids: Sequence[int]) -> None:
        self._forced = list(ids)
        self._place = "forced" if ids else "answer"

    def _set(self, fill: int | None, ids: Sequence[int], allowed: bool) -> Tensor:
        """The mask, filled unless that is None, with the bits of these tokens set or cleared."""
        if fill is not None:
            self._words.fill_(fill)
        for id in ids:
            bit = 1 << id % 32
            word = int(self._words[id // 32]) & 0xFFFFFFFF
            word = word | bit if allowed else word & ~bit
            self._words[id // 32] = word - (1 << 32) if word >> 31 else word
        return self._words
