"""A step: tokens of one or several sequences that pass the layers together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.runtime.state.rope import Rope

NO_SLOT = -1  # in `Step.write`: the state after this token is lost

Ending = Literal["together", "apart", "last"]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence in a step, as the host knows them."""

    row: int  # of the block tables
    first: int  # position of the first token
    count: int  # tokens, one after another
    pages: tuple[int, ...] = ()  # block table of the sequence
    read: int = NO_SLOT  # slot of its row of `Step.read`
    # Slots of its tokens in `Step.write`, one each; empty without linear layers
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """Tokens whose embeddings do not come from the model's table: those of an image."""

    first: int  # of these tokens in a step
    rows: "Tensor"  # [n, h], their embeddings, on any device
    # [n, 1] bool on the model's device: which rows stand for their tokens; None for all
    mask: "Tensor | None" = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step as the host knows it, beside the numbers in its `StepBuffers`.

    On a GPU steps of one plan are one CUDA graph, so sizes are rounded up to few.
    """

    tokens: int  # M, padding included
    sequences: int  # B, padding included
    max_kv_len: int  # see `Step`
    longest: int  # see `Step`
    spans: tuple[Span, ...] = ()  # see `Step`; empty where kernels find all on the device
    prompt: bool = False  # see `Step`
    ending: Ending = "together"  # see `Step`
    drafts: bool = False  # a round: the tokens lie in the buffers, drafts behind known ones
    # Tokens are chosen place by place, since penalties count those chosen before
    ordered: bool = False
    embedded: tuple[Embedded, ...] = ()  # see `Step`
    # [3, M] int64 on the host, see `Step`; None where a token's three positions are one
    axes: "Tensor | None" = None
    shifted: bool = False  # some tokens stand behind an image, see `step_of`
    first: int = 0  # of its tokens in the buffers; 0 but for a part, see `parts_of`


@dataclass(frozen=True, slots=True)
class Step:
    """M tokens of B sequences, and where the state of these sequences lies.

    Tokens of a sequence stand side by side in the order of their positions. Tensors are on the
    model's device, so that a recorded step follows its sequences without the host.
    """

    positions: "Tensor"  # [M] int32, position of each token in its sequence
    rows: "Tensor"  # [M] int32, row of `tables` of each token's sequence
    # [B + 1] int32, first token of each sequence, then M; of prompts the number of their tokens,
    # which may be less than M: others are padding, of which nothing is stored, and the last
    # sequences may be empty
    starts: "Tensor"
    tables: "Tensor"  # [R, T] int32, block tables: the page of each PAGE positions
    read: "Tensor"  # [B] int32, slot with the recurrent state before the sequence's first token
    write: "Tensor"  # [M] int32, slot that takes the state after the token, or NO_SLOT
    max_kv_len: int  # every position is below it; kernels divide their work by it
    longest: int  # most tokens of one sequence
    # The B sequences, as the host knows them; GPU kernels do not look at them, only PyTorch's
    # attention of a lone prompt does, see `attention_prefill`
    spans: tuple[Span, ...]
    # True for a chunk of a prompt that takes the kernels for many tokens; others take those that
    # give each token the same bits in any company. Of several prompts (B > 1) on Hopper alone
    prompt: bool = False
    # Way of prompts through the end of the last layer, behind their keys, values and states: all
    # tokens together; the last one of each prompt apart, so that it has the same bits whether or
    # not the others pass, too; or only those
    ending: Ending = "together"
    # [M] int32, rows of the rotary tables for the tokens, ascending by one in a sequence of a
    # decode step; None where they are the positions
    own_angles: "Tensor | None" = None
    # Tokens of a chunk of a prompt that the model does not look up in its table
    embedded: tuple[Embedded, ...] = ()
    # [3, M] int64, time, row and column of the tokens of a chunk with a part of an image; `angles`
    # are the times, for drafters that know no other axis
    axes: "Tensor | None" = None
    # Rotary tables with a row for each token by its axes, and [M] int32, the numbers of these rows;
    # the model makes them
    own_rope: "tuple[Rope, Tensor] | None" = None

    @property
    def angles(self) -> "Tensor":
        """[M] int32, row of the rotary tables for each token."""
        return self.positions if self.own_angles is None else self.own_angles

    def rotation(self, rope: "Rope") -> "tuple[Rope, Tensor]":
        """Rotary tables, of a layer or of the step, and each token's row of them: [M] int32."""
        return (rope, self.angles) if self.own_rope is None else self.own_rope

    def end(self, finish: "Callable[..., Tensor]", *rows: "Tensor") -> "Tensor":
        """Run the end of the last layer for all tokens, or those that end; see `ending`.

        Args:
            finish: makes [M, h] of tensors [M, n].
            rows: these tensors.

        Returns:
            [M, h]; [B, h] where only the last token of each sequence passes.
        """
        if self.ending == "together":
            return finish(*rows)
        at = (self.starts[1:] - 1).long()
        last = finish(*(each.index_select(0, at) for each in rows))
        return last if self.ending == "last" else finish(*rows).index_copy(0, at, last)


def parts_of(plan: StepPlan, most: int) -> list[StepPlan]:
    """Cut a plain step into parts of at most `most` tokens, in the order of its sequences.

    A step that is no longer is its only part. Rounds and prompts are never cut.
    """
    if plan.tokens <= most:
        return [plan]
    if plan.drafts or plan.longest > 1:
        raise ValueError(f"a step of {plan.tokens} tokens with several of a sequence is not cut")
    parts = []
    for at in range(0, plan.tokens, most):
        count, spans = min(most, plan.tokens - at), plan.spans[at : at + most]
        first = plan.first + at
        parts.append(replace(plan, tokens=count, sequences=count, spans=spans, first=first))
    return parts


def token_columns(spans: Sequence[Span]) -> tuple[list[int], list[int], list[int]]:
    """Row, position, and place in its span of every token."""
    rows: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    for span in spans:
        rows += [span.row] * span.count
        positions += range(span.first, span.first + span.count)
        places += range(span.count)
    return rows, positions, places


def starts_of(spans: Sequence[Span]) -> list[int]:
    """Index of the first token of each span, then the number of all tokens."""
    return [0, *accumulate(span.count for span in spans)]
