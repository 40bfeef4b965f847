"""One step: tokens of one or several sequences that pass the layers together."""

from dataclasses import dataclass

from torch import Tensor

NO_SLOT = -1  # in `Step.write`: the state after this token is not kept


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence in a step, as the host knows them.

    Attributes:
        row: of the block tables.
        first: position of the first token.
        count: tokens, one after another.
    """

    row: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Step:
    """M tokens of B sequences, and where the state of these sequences lies.

    Tokens of a sequence stand side by side in the order of their positions. Tensors are on the
    model's device, so that a recorded step follows its sequences without the host.

    Attributes:
        positions: [M] int32, position of each token in its sequence.
        rows: [M] int32, row of `tables` of each token's sequence.
        starts: [B + 1] int32, first token of each sequence, then M.
        tables: [R, T] int32, block tables: the page of each PAGE positions.
        read: [B] int32, slot with the recurrent state before the sequence's first token.
        write: [M] int32, slot that takes the state after the token, or NO_SLOT.
        reach: every position is below it; kernels divide their work by it.
        longest: most tokens of one sequence.
        spans: of the B sequences, as the host knows them; decode kernels do not look at them.
        prompt: whether the tokens are a chunk of one sequence's prompt (B = 1) that takes the
            kernels for many tokens; else they take those that give each token the same bits in
            any company.
    """

    positions: Tensor
    rows: Tensor
    starts: Tensor
    tables: Tensor
    read: Tensor
    write: Tensor
    reach: int
    longest: int
    spans: tuple[Span, ...]
    prompt: bool = False
