"""Tasks for the ranks of a model on GPUs, whose numbers are on the first one's GPU already.

Each rank runs them with a runner of its own. Tokens, positions and slots of a step, and embeddings
of images, pass from GPU to GPU; the host sends what it knows.
"""

from dataclasses import dataclass

from lowbit.runtime.state.step import StepPlan


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run a decode step up to the logits."""

    plan: StepPlan
    fresh: bool  # run it once before, so that all kernels are compiled when it is recorded


@dataclass(frozen=True, slots=True)
class RunChunk:
    """Run a chunk of a prompt through the layers."""

    plan: StepPlan  # with empty embeddings of images, see `link.unembedded`
    ids: tuple[int, ...]
    begins: bool  # it is the first of its prompt


@dataclass(frozen=True, slots=True)
class RunHead:
    """Run final norm and head for hidden states of so many tokens."""

    tokens: int


@dataclass(frozen=True, slots=True)
class SetPages:
    """Write the block table of a sequence."""

    row: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SetShift:
    """Set what is added to the positions of a sequence for its angles."""

    row: int
    shift: int
