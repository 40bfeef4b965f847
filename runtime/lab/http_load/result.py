"""Figures of a load."""

from collections.abc import Sequence
from dataclasses import dataclass

from lowbit.runtime.lab.http_load.answers import Answered, Failed
from lowbit.runtime.lab.http_load.clients import LoadRecord, OfferedLoad


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Values that half, 95 % and 99 % of a sample reach at most, interpolated between two."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Times within which an answer is a good one; None for no limit."""

    first_token_s: float | None = None
    between_tokens_s: float | None = None  # mean of the answer, as `Answered.between_tokens_s`

    def met(self, answer: Answered) -> bool:
        """Tell if an answer meets the limits."""
        between_s = answer.between_tokens_s
        slow = self.first_token_s is not None and answer.first_s > self.first_token_s
        slower = self.between_tokens_s is not None and (between_s or 0.0) > self.between_tokens_s
        return not (slow or slower)


@dataclass(frozen=True, slots=True)
class FailureCount:
    """Failures of one kind."""

    kind: str
    count: int
    message: str  # of the first one


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Figures of one load; those of a sample are None where no request was answered."""

    clients: int | None  # see `OfferedLoad`, as the rate
    rate: float | None
    requests: int
    answered: int
    failures: tuple[FailureCount, ...]  # the most frequent first
    duration_s: float  # from the first request to the end of the last
    output_tokens: int  # of all answers
    output_tokens_per_s: float
    requests_per_s: float  # answered
    goodput_per_s: float | None  # answered within the limits; None without any
    first_token_s: Percentiles | None  # from a request to the first event with text
    between_tokens_s: Percentiles | None  # mean of an answer, behind its first token
    between_events_s: Percentiles | None  # of all gaps of all answers
    whole_s: Percentiles | None  # from a request to the last event with text
    prompt_tokens: float | None  # mean, by the server's count; None where it does not tell
    short: int  # answers with fewer tokens than were asked for
    counted_events: int  # answers whose tokens the server does not count: events with text are
    most_at_once: int  # see `LoadRecord`, as those below
    held: int
    most_late_s: float
    busy_share: float


def load_result(
    load: OfferedLoad, record: LoadRecord, new_tokens: int, limits: LatencyLimits
) -> LoadResult:
    """The figures of a load that has ended.

    Args:
        new_tokens: that each request asked for.
    """
    answers = [each for each in record.outcomes if isinstance(each, Answered)]
    failed = [each for each in record.outcomes if isinstance(each, Failed)]
    begun = min((each.asked_s for each in record.outcomes), default=0.0)
    duration_s = max((each.ended_s for each in record.outcomes), default=0.0) - begun
    tokens = sum(each.tokens for each in answers)
    good = sum(map(limits.met, answers))
    counted = [each.prompt_tokens for each in answers if each.prompt_tokens is not None]
    between = [each.between_tokens_s for each in answers if each.between_tokens_s is not None]
    return LoadResult(
        clients=load.clients,
        rate=load.rate,
        requests=len(record.outcomes),
        answered=len(answers),
        failures=failure_counts(failed),
        duration_s=duration_s,
        output_tokens=tokens,
        output_tokens_per_s=_per_s(tokens, duration_s),
        requests_per_s=_per_s(len(answers), duration_s),
        goodput_per_s=None if limits == LatencyLimits() else _per_s(good, duration_s),
        first_token_s=percentiles([each.first_s for each in answers]),
        between_tokens_s=percentiles(between),
        between_events_s=percentiles([gap for each in answers for gap in each.gaps_s]),
        whole_s=percentiles([each.whole_s for each in answers]),
        prompt_tokens=sum(counted) / len(counted) if counted else None,
        short=sum(each.tokens < new_tokens for each in answers),
        counted_events=sum(not each.by_usage for each in answers),
        most_at_once=record.most_at_once,
        held=record.held,
        most_late_s=record.most_late_s,
        busy_share=record.busy_share,
    )


def percentiles(sample: Sequence[float]) -> Percentiles | None:
    """Percentiles of a sample; None of an empty one."""
    if not sample:
        return None
    ordered = sorted(sample)
    return Percentiles(*(_at(ordered, share) for share in (0.50, 0.95, 0.99)))


def failure_counts(failed: Sequence[Failed]) -> tuple[FailureCount, ...]:
    """Failures by their kinds, the most frequent first."""
    first = {each.kind: each.message for each in reversed(failed)}
    kinds = [each.kind for each in failed]
    counts = [FailureCount(kind, kinds.count(kind), message) for kind, message in first.items()]
    return tuple(sorted(counts, key=lambda each: (-each.count, each.kind)))


def _at(ordered: Sequence[float], share: float) -> float:
    """The value at a share of the way from the first to the last."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _per_s(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s else 0.0
