"""Metrics under vLLM's names; of a server that speculates also its answers and its log."""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from lowbit.runtime.engine.load import load
from lowbit.runtime.engine.stats import SOURCES, OfSource
from lowbit.runtime.serve.metrics import Collector, Metrics, new_registry
from lowbit.runtime.state.sampling_params import SamplingParams
from tests.runtime.serve.conftest import BUNDLED, LONG, NAME, Running, counts_of, running, until

HYBRID = BUNDLED.parent / "tiny-qwen3.5"
DRAFTS = 3
# https://docs.vllm.ai/en/latest/usage/metrics.html, as prometheus_client prints counters.
NAMES = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
PROMPT = "Once upon a time"
BODY = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def drafting() -> Iterator[Running]:
    model = load(
        HYBRID, device="cpu", context=512, max_sequences=4, speculate="mtp", draft_tokens=DRAFTS
    )
    with running(model) as found:
        yield found


def metrics(server: Running) -> dict[str, float]:
    text = httpx2.get(f"{server.url}/metrics").text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def counts(found: dict[str, float]) -> tuple[list[float], list[float]]:
    """Totals, and accepted drafts by position."""
    label = f'{{model_name="{NAME}"}}'
    places = [f'{BY_POSITION}{{model_name="{NAME}",position="{n}"}}' for n in range(DRAFTS)]
    return [found[name + label] for name in NAMES], [found[name] for name in places]


def complete(server: Running, **changes: Any) -> Any:
    answer = httpx2.post(f"{server.url}/v1/completions", json={**BODY, **changes}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_metrics_count_the_drafts_of_requests_that_ended(drafting: Running) -> None:
    before, by_position = counts(metrics(drafting))
    assert len(by_position) == DRAFTS
    assert not any(BY_POSITION in name and f'"{DRAFTS}"' in name for name in metrics(drafting))
    complete(drafting)
    totals, places = counts(metrics(drafting))
    rounds, drafted, accepted = (new - old for new, old in zip(totals, before, strict=True))
    grown = [new - old for new, old in zip(places, by_position, strict=True)]
    made = drafting.model.generate(PROMPT, raw=True, sampling=SamplingParams(), max_new_tokens=40)
    assert made.speculation is not None
    assert (rounds, drafted) == (made.speculation.rounds, sum(made.speculation.drafted))
    assert accepted == sum(grown) == sum(made.speculation.accepted)
    assert grown[: len(made.speculation.accepted)] == list(made.speculation.accepted)
    assert rounds > 0


def test_positions_go_on_where_a_grammar_has_forced_more() -> None:
    load: Any = SimpleNamespace(pages=1, pages_used=0, running=0, waiting=0)
    found: Any = SimpleNamespace(load=load, grammar_bytes=0, grammars_waiting=0)
    metrics = Metrics()
    registry = new_registry(Collector(metrics, found, NAME, "exact", positions=2))

    def shown() -> list[float | None]:
        labels = ({"model_name": NAME, "position": str(place)} for place in range(4))
        return [registry.get_sample_value(BY_POSITION, each) for each in labels]

    assert shown() == [0, 0, None, None]
    metrics.drafts.count(1, 1, "drafter")
    assert shown() == [1, 0, None, None]
    metrics.drafts.count(3, 2, "forced")
    assert shown() == [2, 1, 0, None]


def test_metrics_say_who_drafted(drafting: Running) -> None:
    before = metrics(drafting)
    complete(drafting)
    after = metrics(drafting)

    def grown(name: str, source: str) -> float:
        key = f'lowbit:drafts_{name}_total{{model_name="{NAME}",source="{source}"}}'
        return after[key] - before[key]

    made = drafting.model.generate(PROMPT, raw=True, sampling=SamplingParams(), max_new_tokens=40)
    assert made.speculation is not None
    own = asdict(made.speculation.sources["head"])
    assert {name: grown(name, "head") for name in own} == own
    for source in set(SOURCES) - {"head"}:
        assert {grown(name, source) for name in own} == {0}


def test_drafts_of_a_request_whose_client_leaves_are_counted(drafting: Running) -> None:
    before = drafting.service.metrics.drafts.rounds
    aborted = drafting.service.metrics.finished["abort"]
    body = {**BODY, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", f"{drafting.url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        for _ in range(12):
            next(lines)
    until(lambda: drafting.service.metrics.finished["abort"] > aborted)
    until(lambda: drafting.service.metrics.drafts.rounds > before)


def test_the_log_has_tokens_a_round(drafting: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lowbit.serve"):
        complete(drafting)
        complete(drafting, max_tokens=1)
        until(lambda: sum("/v1/completions" in line for line in caplog.messages) == 2)
    first, second = (line for line in caplog.messages if "/v1/completions" in line)
    assert " tokens a round, length" in first or " tokens a round, stop" in first
    assert "tokens a round" not in second


def test_answers_are_the_same_and_usage_has_no_predicted_outputs(
    drafting: Running,
) -> None:
    """`*_prediction_tokens` of OpenAI's schema are of texts that a request itself predicts."""
    found = complete(drafting)
    plain = load(HYBRID, device="cpu", context=512)
    with running(plain) as server:
        expected = complete(server)
        assert not any("spec_decode" in name for name in metrics(server))
    assert found["choices"] == expected["choices"]
    assert found["usage"] == expected["usage"]
    assert "prediction" not in str(found["usage"])


def test_metrics_count_what_happened(server: Running) -> None:
    before = metrics(server)
    body = {**LONG, "max_tokens": 7}
    httpx2.post(f"{server.url}/v1/completions", json=body)
    after = metrics(server)
    label = f'{{model_name="{NAME}"}}'
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown[f"vllm:generation_tokens_total{label}"] == 7
    assert grown[f"vllm:prompt_tokens_total{label}"] > 1
    assert grown[f'vllm:request_success_total{{finished_reason="length",model_name="{NAME}"}}'] == 1
    assert grown[f"vllm:time_to_first_token_seconds_count{label}"] == 1
    assert grown[f"vllm:inter_token_latency_seconds_count{label}"] == 6
    assert after[f"vllm:num_requests_running{label}"] == 0
    assert after[f'lowbit:model_info{{activations="exact",model_name="{NAME}"}}'] == 1
    assert 0 <= after[f"vllm:kv_cache_usage_perc{label}"] <= 1


def test_every_answer_has_waited_once(drafting: Running) -> None:
    name = f'vllm:request_queue_time_seconds_count{{model_name="{NAME}"}}'
    total = name.replace("_count", "_sum")
    before = metrics(drafting)
    complete(drafting, n=3, max_tokens=5, temperature=1)
    complete(drafting, max_tokens=1)
    after = metrics(drafting)
    assert after[name] - before[name] == 4
    assert 0 <= after[total] - before[total] < 60


def test_metrics_of_processes_are_sums() -> None:
    sums, twice = Metrics(), Metrics()
    for tokens in (3, 4):
        sums.add(counts_of(tokens))
    whole = counts_of(7)
    assert sums.counts.finished == whole.finished == Counter(stop=7)
    assert sums.counts.responses == [("/metrics", 200, 7)]
    assert sums.counts.tokens == (7, 2, 4)
    assert sums.whole.count == 9
    assert sums.whole.total == pytest.approx(7000.4)
    assert sums.first_token.count == 2
    assert sums.drafts.speculated.sources["head"] == OfSource(2, 4, 4, 2)
    load: Any = SimpleNamespace(pages=1, pages_used=0, running=0, waiting=0)
    found: Any = SimpleNamespace(load=load, grammar_bytes=0, grammars_waiting=0)
    registry = new_registry(Collector(sums, found, "none", "exact"))
    bucket = {"model_name": "none", "le": "+Inf"}
    assert registry.get_sample_value("vllm:e2e_request_latency_seconds_bucket", bucket) == 9
    twice.add(sums.counts)
    assert twice.counts == sums.counts
