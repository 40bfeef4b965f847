"""Rounds of speculative decoding, counted on a text: how often each draft of the head is right.

A round begins at every column of a window. Its first draft is the head's at that column, and the
next come from the drafted token and the head's own state; they attend to the columns of the text up
to the beginning and to the round's own. A draft is right where it is the token that the trunk ranks
first. That is known as long as the text goes on with the trunk's tokens; where it does not, the
round is followed no further, and counts for the drafts before.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.convert.mtp.head import (
    MtpHead,
    chained,
    draft_tokens,
    greedy_tokens,
    load_mtp_head,
)
from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.threads import Pool, for_each
from lowbit.convert.original.walk import blocks, embed
from lowbit.formats.head_rows import PackedRows

WINDOWS = 8  # of each text
ROUNDS = 128  # of a window at a time, so that columns stay few
MOST_DRAFTS = 4  # of a round


@dataclass(frozen=True, slots=True)
class Draft:
    """One of the drafts of a round, made by the head for multi-token prediction."""

    reached: int  # rounds that came so far, all drafts before it being right
    right: int  # those of them in which it is the token that the trunk ranks first
    agreement: float  # right over reached
    # Share of all rounds in which it is accepted: the product of the agreements up to here
    accepted: float
    tokens_a_round: float  # expected, with this as the last draft: one and the sum of those shares


@dataclass(frozen=True, slots=True)
class Drafting:
    """Quality of the head for multi-token prediction, of rounds of speculative decoding."""

    drafted_windows: int  # of the texts, in which rounds begin at every token
    packed: tuple[Draft, ...]  # first to fourth draft of the packed head, against the packed trunk
    original: tuple[Draft, ...]  # same for the original's head and trunk
    # Same with drafts chosen from the draft head; empty without one
    draft_head: tuple[Draft, ...] = ()
    draft_rows: int = 0  # tokens of the draft head; 0 without one
    # Share of the packed trunk's first choices that are among them; 0 without one
    covered: float = 0.0


@dataclass(slots=True)
class _Rounds:
    """Rounds of a window that are still followed."""

    starts: Tensor  # [rounds] columns at which they began
    # [rounds, h] inputs of the layer, one of each draft so far after the first
    inputs: list[Tensor] = field(default_factory=list)
    # [rounds, h] the head's states at the last draft
    states: Tensor = field(default_factory=lambda: torch.empty(0))
    # [rounds] tokens drafted last
    drafts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.starts)

    def keep(self, chosen: Tensor) -> None:
        """Drop the rounds that are not chosen."""
        self.starts, self.drafts = self.starts[chosen], self.drafts[chosen]
        self.states = self.states[chosen]
        self.inputs = [x[chosen] for x in self.inputs]


def drafted_windows(counts: Sequence[int]) -> list[int]:
    """Numbers of the windows that rounds are counted in."""
    starts = [sum(counts[:number]) for number in range(len(counts))]
    return [
        start + number
        for start, count in zip(starts, counts, strict=True)
        for number in range(min(count, WINDOWS))
    ]


def measure_drafting(
    models: tuple[LayeredModel, LayeredModel],
    windows: Tensor,
    states: tuple[Tensor, Tensor],
    draft_head: PackedRows | None,
    pool: Pool,
) -> Drafting | None:
    """Count the drafts of the original's head, of the packed one, and with its draft head.

    Args:
        models: original and packed.
        windows: [windows, T] int64 token ids.
        states: [windows, T - 1, h] float32 of both, after the final norm.
        draft_head: of the packed folder; None without one.

    Returns:
        None where the packed folder has no head for multi-token prediction.
    """
    drafts = []
    for model, own in zip(models, states, strict=True):
        greedy = greedy_tokens(model, own.flatten(0, 1), pool).view(own.shape[:2])
        drafts.append(count_drafts(model, windows, own, greedy, pool))
    original, packed = drafts
    if not packed:
        return None
    if draft_head is None:
        return Drafting(len(windows), packed, original)
    few = count_drafts(models[1], windows, states[1], greedy, pool, draft_head)
    covered = torch.isin(greedy, draft_head.ids.to(greedy)).double().mean()
    return Drafting(len(windows), packed, original, few, len(draft_head.ids), float(covered))


def count_drafts(
    model: LayeredModel,
    windows: Tensor,
    states: Tensor,
    greedy: Tensor,
    pool: Pool,
    draft_head: PackedRows | None = None,
    head: MtpHead | None = None,
) -> tuple[Draft, ...]:
    """Count the right drafts of a model's head for multi-token prediction.

    Args:
        model: loaded for windows of T tokens.
        windows: [windows, T] int64 token ids.
        states: [windows, T - 1, h] float32, of the trunk after its final norm.
        greedy: [windows, T - 1] int64, tokens that the trunk ranks first.
        draft_head: rows that drafts are chosen from; all of the model's head where left out.
        head: to take instead of the checkpoint's.

    Returns:
        The first to the fourth draft, fewer where no round came so far; none without a head.
    """
    head = head or load_mtp_head(model, states.device)
    if head is None or states.shape[1] < 2:
        return ()
    windows = windows.to(states.device)

    def choose(x: Tensor) -> Tensor:
        return (
            greedy_tokens(model, x, pool)
            if draft_head is None
            else draft_tokens(draft_head, x, pool)
        )

    text = _text_columns(model, head, windows, states, pool)
    columns = torch.arange(states.shape[1] - 1, device=states.device)
    rounds = [_Rounds(columns) for _ in windows]
    drafts: list[Draft] = []
    for depth in range(1, MOST_DRAFTS + 1):
        if depth > 1:
            _join(model, head, rounds)
        _draft(head, text, rounds, choose, pool)
        reached = sum(map(len, rounds))
        right = _follow(rounds, greedy, windows, depth)
        if not reached:
            break
        before = drafts[-1].accepted if drafts else 1.0
        tokens = drafts[-1].tokens_a_round if drafts else 1.0
        accepted = before * right / reached
        drafts.append(Draft(reached, right, right / reached, accepted, tokens + accepted))
    return tuple(drafts)


def _text_columns(
    model: LayeredModel, head: MtpHead, windows: Tensor, states: Tensor, pool: Pool
) -> Tensor:
    """Inputs of the layer at the columns of the text: [windows, T - 1, h]."""
    x = embed(model, windows[:, 1:], states.device)

    def join(part: slice) -> None:
        x[part] = head.joined(x[part], states[part])

    for_each(pool, join, blocks(len(windows), 1))
    return x


def _join(model: LayeredModel, head: MtpHead, rounds: Sequence[_Rounds]) -> None:
    drafts = torch.cat([one.drafts for one in rounds])
    if not len(drafts):
        return
    embeddings = embed(model, drafts[None], drafts.device)[0]
    for one, part in zip(rounds, _parts(rounds), strict=True):
        one.inputs.append(head.joined(embeddings[part], one.states))


def _draft(
    head: MtpHead,
    text: Tensor,
    rounds: Sequence[_Rounds],
    choose: Callable[[Tensor], Tensor],
    pool: Pool,
) -> None:

    def run(part: slice) -> None:
        for number in range(part.start, part.stop):
            rounds[number].states = _states(head, text[number], rounds[number])

    for_each(pool, run, blocks(len(rounds), 1))
    states = torch.cat([one.states for one in rounds])
    drafts = choose(states)
    for one, part in zip(rounds, _parts(rounds), strict=True):
        one.drafts = drafts[part]


def _parts(rounds: Sequence[_Rounds]) -> Iterator[slice]:
    """Places of each window's rounds where those of all windows are joined."""
    start = 0
    for one in rounds:
        yield slice(start, start + len(one))
        start += len(one)


def _states(head: MtpHead, text: Tensor, rounds: _Rounds) -> Tensor:
    """The head's states at the last column of each round of a window: [rounds, h]."""
    if not rounds.inputs:
        columns = torch.arange(len(text), device=text.device)
        return head(text, columns, columns[:, None] >= columns)[rounds.starts]
    outputs = [text[:0]]
    for part in blocks(len(rounds), ROUNDS):
        starts = rounds.starts[part]
        outputs.append(
            head(*chained(text, starts, [x[part] for x in rounds.inputs]))[-len(starts) :]
        )
    return torch.cat(outputs)


def _follow(rounds: Sequence[_Rounds], greedy: Tensor, windows: Tensor, depth: int) -> int:
    """Count the right drafts; rounds go on that were right, with the text, inside the window."""
    right = 0
    for one, trunk, ids in zip(rounds, greedy, windows, strict=True):
        expected = trunk[one.starts + depth]
        correct = one.drafts == expected
        right += int(correct.sum())
        following = ids[one.starts + depth + 1]
        one.keep(correct & (following == expected) & (one.starts + depth + 1 < len(trunk)))
    return right
