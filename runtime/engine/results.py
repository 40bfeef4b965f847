"""Results of steps: tokens on the host, appended to their sequences once a step is done."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from lowbit.formats.errors import CheckpointError, LowbitError
from lowbit.runtime.engine.constraints import accept
from lowbit.runtime.engine.scoring import take_scores
from lowbit.runtime.engine.sequence import Ended, Finish, Sequence, TokenLogProbabilities
from lowbit.runtime.state.host_rings import RING, LogProbabilities, new_log_probabilities, new_ring


class PendingStep(Protocol):
    """A step under way."""

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences that get tokens from it."""

    @property
    def finished(self) -> bool:
        """True if a GPU has finished it, so that nobody has to wait for it."""

    def commit(self) -> Ended:
        """Wait for the step and append its tokens; returns the sequences that end."""


class Results:
    """Host memory that steps write to, a column for each row of the sampler.

    Attributes:
        ring: [RING, R] int64, chosen tokens by their position modulo RING; -1 after logits
            that are not finite.
        log_probabilities: of these tokens.
        tokens: `ring` as an array, from which a number is read faster.
        waiting: made around every wait for a step; raises the error of one that another rank has
            left.
    """

    def __init__(self, rows: int, on_gpu: bool) -> None:
        """Page-lock the rings that a GPU writes to."""
        self.ring = new_ring(rows, on_gpu)
        self.log_probabilities = new_log_probabilities(rows, on_gpu)
        self.tokens = self.ring.numpy()  # a tensor takes 4 us to read a number
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._on_gpu = on_gpu
        self._held: list[tuple[torch.cuda.Event, LogProbabilities]] = []

    def record(self) -> "torch.cuda.Event | None":
        """Event behind all work under way; None on a CPU, where steps run at once."""
        if not self._on_gpu:
            return None
        if self._held:
            self._held = [each for each in self._held if not each[0].query()]  # type: ignore[no-untyped-call]
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, done: "torch.cuda.Event | None") -> None:
        """Wait for a step; done: the event behind it, see `record`.

        Raises:
            LowbitError: another rank has ended, so that nothing that steps left counts.
        """
        if done is not None:
            with self.waiting():
                done.synchronize()

    def hold(self, scores: LogProbabilities) -> None:
        """Keep page-locked memory alive until the kernels under way no longer write to it."""
        event = self.record()
        if event is not None:
            self._held.append((event, scores))

    def append(self, sequence: Sequence, token: int) -> Finish | LowbitError | None:
        """Append a token to the output of a running sequence.

        Args:
            token: chosen by a step; -1 after logits that are not finite.

        Returns:
            Reason of the sequence's end; None if it goes on.
        """
        output, request = sequence.output, sequence.request
        position = len(request.prompt) + len(output)
        bad = None if sequence.scores is None else take_scores(sequence)
        if token < 0 and bad is None:
            bad = position
        if bad is not None:
            return nonfinite_error(bad)
        if sequence.count == 0:
            return "length"
        if request.sampling.logprobs is not None:
            found = self._log_probabilities_of(sequence, position, request.sampling.logprobs)
            sequence.log_probabilities.append(found)
        output.append(token)
        sequence.unread.append(token)
        if token in request.stop_ids:
            return "stop"
        if len(output) == sequence.count:
            return "length"
        return None if request.constraint is None else accept(sequence, token)

    def _log_probabilities_of(
        self, sequence: Sequence, position: int, top: int
    ) -> TokenLogProbabilities:
        at = (position % RING, sequence.row, slice(1 + top))
        values = self.log_probabilities.values[at].tolist()
        ids = self.log_probabilities.ids[at].tolist()
        return TokenLogProbabilities(values[0], tuple(zip(ids[1:], values[1:], strict=True)))


@dataclass(slots=True)
class PlainStep:
    """A step without drafts under way: one token for each sequence."""

    sequences: list[Sequence]  # that get a token
    results: Results  # that the step writes to
    done: "torch.cuda.Event | None"  # event behind the step; None on a CPU

    @property
    def finished(self) -> bool:
        """True if a GPU has finished it, so that nobody has to wait for it."""
        return self.done is not None and self.done.query()  # type: ignore[no-untyped-call]

    def commit(self) -> Ended:
        """Wait for the step and append its tokens; returns the sequences that end."""
        ended: Ended = []
        results = self.results
        results.wait(self.done)
        for sequence in self.sequences:
            if sequence.phase == "ended":
                continue
            token = int(results.tokens[(sequence.last + 1) % RING, sequence.row])
            end = results.append(sequence, token)
            if end is not None:
                ended.append((sequence, end))
        return ended


def nonfinite_error(tokens: int) -> CheckpointError:
    """Error of a sequence whose logits after `tokens` tokens are NaN or infinite."""
    return CheckpointError(
        f"the logits after {tokens} tokens are NaN or infinite, so no token can be chosen",
        hint="some activation overflows: look for damaged weights with `lowbit-convert verify "
        "MODEL` and `lowbit-convert report MODEL`, or convert the original again",
    )
