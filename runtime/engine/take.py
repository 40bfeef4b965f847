"""A new token is put behind the output of its sequence, which may end with it."""

from lowbit.formats.errors import LowbitError
from lowbit.runtime.engine.nonfinite import nonfinite_error
from lowbit.runtime.engine.restrict import accept
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.scores import take_scores
from lowbit.runtime.engine.sequence import Finish, Sequence


def take_token(sequence: Sequence, token: int, runner: Runner) -> Finish | LowbitError | None:
    """Put a token behind the output of a sequence.

    Args:
        sequence: running.
        token: as a step has chosen it, -1 after logits that are not finite.
        runner: with its log-probabilities.

    Returns:
        Why the sequence ends here, None where it goes on.
    """
    bad = take_scores(sequence)
    if token < 0 and bad is None:
        bad = sequence.last + 1
    if bad is not None:
        return nonfinite_error(bad)
    if sequence.count == 0:
        return "length"
    if sequence.request.sampling.logprobs is not None:
        found = runner.log_probabilities(sequence, sequence.last + 1)
        sequence.log_probabilities.append(found)
    sequence.output.append(token)
    sequence.unread.append(token)
    if sequence.drafter is not None:
        sequence.drafter.append(token)
    if token in sequence.request.stop_ids:
        return "stop"
    if len(sequence.output) == sequence.count:
        return "length"
    return accept(sequence, token)
