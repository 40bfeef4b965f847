"""Metrics for Prometheus, under vLLM's names where vLLM has the same thing.

Plain numbers are counted where things happen, each by one thread, and turned into metrics when
somebody asks: prometheus_client's own counters take a lock for every token.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric

from lowbit.formats.activation_modes import Activations
from lowbit.runtime.engine.stats import SOURCES, OfSource, Speculated, Tally
from lowbit.runtime.engine.stream import Answer
from lowbit.runtime.serve.link.messages import LoadFound


@dataclass(slots=True)
class Histogram:
    """Counts of values by their size; counting one takes a fraction of a microsecond.

    One thread counts; any may read.
    """

    bounds: Sequence[float]  # upper bounds of the buckets, ascending; one more bucket is above them
    total: float = 0.0
    _counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Start with empty buckets."""
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound of every bucket, with the number of values up to it."""
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        found, count = [], 0
        for name, more in zip(names, self._counts, strict=True):
            count += more
            found.append((name, float(count)))
        return found

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self._counts)

    @property
    def counts(self) -> tuple[float, list[int]]:
        """The sum of all values, and the number of those in each bucket."""
        return self.total, list(self._counts)

    def add(self, total: float, counts: Sequence[int]) -> None:
        """Count the values of another, which has the same bounds."""
        self.total += total
        self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]


FIRST_TOKEN_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
BETWEEN_TOKENS_S = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
WHOLE_S = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0)
LONG_S = (120.0, 240.0, 480.0, 960.0)


class Counts(msgspec.Struct, array_like=True, frozen=True):
    """Metrics on their way between processes."""

    tokens: tuple[int, int, int]  # of prompts, of these from the cache, new ones
    histograms: list[tuple[float, list[int]]]  # see `Histogram.counts`
    finished: dict[str, int]
    responses: list[tuple[str, int, int]]  # path, status, number
    drafts: Speculated


@dataclass(slots=True)
class Metrics:
    """Counts of a server since its start."""

    prompt_tokens: int = 0  # prompt tokens of answers that have begun
    cached_tokens: int = 0
    new_tokens: int = 0
    # Seconds that answers waited for a row
    queued: Histogram = field(default_factory=lambda: Histogram((0.001, *WHOLE_S, *LONG_S)))
    # Seconds from a request to its first token
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS_S))
    # Seconds from a request to the end of its answers
    whole: Histogram = field(default_factory=lambda: Histogram((*WHOLE_S, *LONG_S)))
    finished: Counter[str] = field(default_factory=Counter)
    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    # Drafted and accepted tokens of answers that have ended, cancelled ones included
    drafts: Tally = field(default_factory=Tally)

    def count_tokens(self, answer: Answer, asked_at: float, before: int, last_at: float) -> None:
        """Count the tokens that a step brought, on the event loop.

        Args:
            before: number of its tokens before the step.
            last_at: time of the last token before the step.
        """
        new = answer.count - before
        self.new_tokens += new
        if before:
            self.between_tokens.observe((answer.last_at - last_at) / new, new)
            return
        self.first_token.observe(answer.last_at - asked_at)
        self.prompt_tokens += len(answer.request.prompt)
        self.cached_tokens += answer.handle.reused

    def count_drafts(self, found: Speculated) -> None:
        """Count the drafts of an answer that has ended, on the event loop."""
        self.drafts.add(found)

    @property
    def counts(self) -> Counts:
        """All of them, to be added to those of another process."""
        return Counts(
            (self.prompt_tokens, self.cached_tokens, self.new_tokens),
            [each.counts for each in self._histograms],
            dict(self.finished),
            [(path, status, count) for (path, status), count in self.responses.items()],
            self.drafts.speculated,
        )

    def add(self, other: Counts) -> None:
        """Add those of another process."""
        prompt_tokens, cached_tokens, new_tokens = other.tokens
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.new_tokens += new_tokens
        for own, (total, counts) in zip(self._histograms, other.histograms, strict=True):
            own.add(total, counts)
        self.finished.update(other.finished)
        for path, status, count in other.responses:
            self.responses[path, status] += count
        self.drafts.add(other.drafts)

    @property
    def _histograms(self) -> tuple[Histogram, ...]:
        return self.queued, self.first_token, self.between_tokens, self.whole


@dataclass(frozen=True, slots=True, eq=False)
class Collector:
    """Collector that prometheus_client asks for metrics."""

    metrics: Metrics
    found: LoadFound  # load of the engine
    model: str  # value of the label `model_name`
    activations: Activations  # inputs of quantized linears
    # most drafts of a round, see `DraftSource.positions`; 0 without speculation, which then has no
    # metrics
    positions: int = 0

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        found, load = self.metrics, self.found.load
        share = load.pages_used / max(1, load.pages)
        for name, text, value in (
            ("num_requests_running", "Answers that are being made.", load.running),
            ("num_requests_waiting", "Answers that wait for room.", load.waiting),
            ("kv_cache_usage_perc", "Used share of the cache, 1 is all.", share),
        ):
            yield self._metric(GaugeMetricFamily, name, text, value)
        yield InfoMetricFamily(
            "lowbit:model",
            "The model and how it was loaded.",
            value={"model_name": self.model, "activations": self.activations},
        )
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts.", found.prompt_tokens),
            ("generation_tokens", "New tokens.", found.new_tokens),
            ("prefix_cache_queries", "Tokens looked up in the cache.", found.prompt_tokens),
            ("prefix_cache_hits", "Tokens found in the cache.", found.cached_tokens),
        ):
            yield self._metric(CounterMetricFamily, name, text, value)
        for name, text, times in (
            ("time_to_first_token", "From a request to its first token.", found.first_token),
            ("inter_token_latency", "Between two tokens.", found.between_tokens),
            ("e2e_request_latency", "From a request to its end.", found.whole),
            ("request_queue_time", "Waiting for room.", found.queued),
        ):
            buckets = times.buckets()
            yield self._metric(HistogramMetricFamily, f"{name}_seconds", text, buckets, times.total)
        finished = sorted(found.finished.items())
        text = "Answers that have ended, by the reason."
        yield self._by_label("request_success", text, "finished_reason", finished)
        responses = CounterMetricFamily(
            "lowbit:http_responses", "Responses by path and status.", labels=("path", "status")
        )
        for (path, status), count in sorted(found.responses.items()):
            responses.add_metric((path, str(status)), count)
        yield responses
        text = "Memory of the grammars of answers."
        yield GaugeMetricFamily("lowbit:grammar_memory_bytes", text, value=self.found.grammar_bytes)
        text = "Grammars that wait for memory."
        waiting = self.found.grammars_waiting
        yield GaugeMetricFamily("lowbit:num_grammars_waiting", text, value=waiting)
        if self.positions:
            yield from self._speculation(found.drafts.speculated)

    def _speculation(self, found: Speculated) -> Iterator[Metric]:
        """Metrics of speculation; drafts of a request are counted when it ends."""
        for name, text, value in (
            ("drafts", "Rounds that verified drafts.", found.rounds),
            ("draft_tokens", "Draft tokens that were verified.", sum(found.drafted)),
            ("accepted_tokens", "Draft tokens accepted.", sum(found.accepted)),
        ):
            yield self._metric(CounterMetricFamily, f"spec_decode_num_{name}", text, value)
        name = "spec_decode_num_accepted_tokens_per_pos"
        text = "Draft tokens accepted, by their position in a round from 0 on."
        counts = (*found.accepted, *[0] * (self.positions - len(found.accepted)))
        places = [(str(position), count) for position, count in enumerate(counts)]
        yield self._by_label(name, text, "position", places)
        yield from self._sources(found)

    def _sources(self, found: Speculated) -> Iterator[Metric]:
        """Counts of drafts by who made them, each source from the start on."""
        none = OfSource(0, 0, 0, 0)
        counts = {source: found.sources.get(source, none) for source in SOURCES}
        for name, text in (
            ("rounds", "Rounds that verified drafts of a source."),
            ("drafted", "Draft tokens of a source that were verified."),
            ("compared", "Draft tokens of a source behind accepted ones alone."),
            ("accepted", "Draft tokens of a source accepted."),
        ):
            made = CounterMetricFamily(
                f"lowbit:drafts_{name}", text, labels=("model_name", "source")
            )
            for source, own in counts.items():
                made.add_metric((self.model, source), getattr(own, name))
            yield made

    def _metric(self, family: Callable[..., Metric], name: str, text: str, *value: Any) -> Metric:
        found: Any = family(f"vllm:{name}", text, labels=("model_name",))
        found.add_metric((self.model,), *value)
        made: Metric = found
        return made

    def _by_label(
        self, name: str, text: str, label: str, counts: Iterable[tuple[str, int]]
    ) -> Metric:
        found = CounterMetricFamily(f"vllm:{name}", text, labels=("model_name", label))
        for value, count in counts:
            found.add_metric((self.model, value), count)
        return found


def new_registry(collector: Collector) -> CollectorRegistry:
    """A registry with the metrics of a collector alone."""
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
