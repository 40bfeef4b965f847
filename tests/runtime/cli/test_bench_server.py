"""`lowbit-run bench --url`: figures, tables, refusals, on a made-up server and on a real one."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import lowbit.runtime as lowbit
from lowbit.runtime.cli.main import main
from lowbit.runtime.lab.http_load.answers import Answered
from lowbit.runtime.lab.http_load.bench import ServerResult
from lowbit.runtime.lab.http_load.clients import LoadRecord, OfferedLoad
from lowbit.runtime.lab.http_load.result import LatencyLimits, load_result
from lowbit.runtime.lab.tables import show_server
from tests.lanes import in_commands
from tests.runtime.lab.http_load.conftest import (
    MODEL,
    Answer,
    Asking,
    Served,
    counting,
    serving_in_thread,
)
from tests.runtime.serve.conftest import NAME, Running, running
from tests.short_models import MODELS

FEW = ("--requests", "3", "--new-tokens", "4", "--clients", "2")


def bench(*arguments: str, key: str | None = None) -> Result:
    return CliRunner().invoke(main, ("bench", *arguments), env={"LOWBIT_API_KEY": key})


def measured(url: str, *arguments: str, key: str | None = None) -> dict[str, Any]:
    result = bench("--url", url, "--json", *arguments, key=key)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving_in_thread() as served:
        yield served


def test_json_has_every_figure(server: Served) -> None:
    found = measured(server.url, "--requests", "3", "--new-tokens", "4", "--clients", "2,1")
    loads = found.pop("loads")
    assert found.pop("seed") >= 0
    assert found == {
        "schema": 1,
        "url": server.url,
        "model": MODEL,
        "api": "completions",
        "token_ids": False,
        "prompt_tokens": 64,
        "new_tokens": 4,
        "ignore_eos": True,
        "limits": {"first_token_s": None, "between_tokens_s": None},
        "notes": [],
    }
    assert [load["clients"] for load in loads] == [1, 2]
    for load in loads:
        assert (load["requests"], load["answered"], load["failures"]) == (3, 3, [])
        assert (load["output_tokens"], load["short"], load["counted_events"]) == (12, 0, 0)
        assert load["prompt_tokens"] == 64
        for name in ("first_token_s", "whole_s"):
            assert 0 < load[name]["p50"] <= load[name]["p95"] <= load[name]["p99"]


def test_table_goes_to_stdout_and_the_seed_to_stderr(server: Served) -> None:
    result = bench("--url", server.url, *FEW, "--first-token-limit", "60", "--seed", "7")
    assert result.exit_code == 0
    assert result.stderr == "seed of prompts and arrivals: 7\n"
    lines = result.stdout.splitlines()
    assert lines[0] == f"{MODEL} at {server.url}"
    for words in ("2 clients", "3 of 3", "within the limits", "first token, ms"):
        assert any(words in line for line in lines), words


def test_rates(server: Served) -> None:
    options = ("--rate", "2000,1000", "--requests", "5", "--warm-up", "1", "--api", "chat")
    found = measured(server.url, *options, "--most-at-once", "2", "--between-tokens-limit", "60")
    assert [load["rate"] for load in found["loads"]] == [1000.0, 2000.0]
    for load in found["loads"]:
        assert load["clients"] is None
        assert load["most_at_once"] <= 2
        assert load["goodput_per_s"] == load["requests_per_s"]


def prompts(served: Served, *options: str) -> list[Any]:
    before = len(served.bodies)
    measured(served.url, MODEL, *FEW, *options)
    return [body["prompt"] for body in served.bodies[before:]]


def test_prompts_are_new_in_every_run_unless_a_seed_is_given(server: Served) -> None:
    first, second = prompts(server), prompts(server)
    assert len(first) == 2 + 2 + 3  # to measure the words, to warm up, and those that count
    assert len({*first, *second}) == len(first) + len(second)
    seeded = prompts(server, "--seed", "5")
    assert sorted(seeded) == sorted(prompts(server, "--seed", "5"))
    assert not {*seeded} & {*first}


def test_prompts_of_token_ids(server: Served) -> None:
    assert all(len(ids) == 50 for ids in prompts(server, "--token-ids", "--prompt-tokens", "50"))


async def full(asking: Asking) -> None:
    """Refuse what is no probe."""
    if asking.method == "POST" and asking.body["max_tokens"] > 1:
        error = {"error": {"message": "the queue is full"}}
        await asking.json(error, "429 Too Many Requests", "Retry-After: 0\r\n")
    else:
        await counting(asking)


def test_load_without_an_answer_is_a_failure_behind_its_figures() -> None:
    with serving_in_thread(full) as served:
        result = bench("--url", served.url, *FEW)
        assert "0 of 3" in result.stdout
        assert "2 clients: 3 failed: status 429: the queue is full" in result.stdout
        assert "none of 3 requests was answered; status 429: the queue is full" in result.stderr
        assert result.exit_code == 1
        result = bench("--url", served.url, *FEW, "--json")
        [load] = json.loads(result.stdout)["loads"]
        assert load["failures"] == [
            {"kind": "status 429", "count": 3, "message": "status 429: the queue is full"}
        ]
        assert load["first_token_s"] is None
        assert result.exit_code == 1


def unauthorized(key: str) -> Answer:
    async def answer(asking: Asking) -> None:
        if asking.headers.get("authorization") == f"Bearer {key}":
            await counting(asking)
        else:
            await asking.json({"error": {"message": "wrong key"}}, "401 Unauthorized")

    return answer


def test_key() -> None:
    with serving_in_thread(unauthorized("secret")) as served:
        assert measured(served.url, *FEW, key="secret")["loads"][0]["answered"] == 3
        assert measured(served.url, *FEW, "--api-key", "secret")["loads"][0]["answered"] == 3
        result = bench("--url", served.url, *FEW, key="other")
        assert result.exit_code == 1
        assert f"Error: {served.url}: status 401: wrong key" in result.stderr
        assert "hint: LOWBIT_API_KEY or --api-key" in result.stderr


def test_no_server() -> None:
    result = bench("--url", "127.0.0.1:1", *FEW)
    assert result.exit_code == 1
    assert "Error: http://127.0.0.1:1: cannot connect" in result.stderr
    assert "hint: is the server running there?" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--url x --clients 2 --rate 1", "--clients and --rate exclude each other."),
        ("--url x --most-at-once 2", "--most-at-once needs --rate."),
        ("--url x --token-ids --api chat", "--token-ids needs --api completions"),
        ("--url x --runs 3", "--runs is for a model that is loaded, not for --url."),
        ("--url x --sampled", "--sampled is for a model that is loaded, not for --url."),
        ("--url x --threads 1", "--url takes no option for loading a model"),
        ("--url x --speculate ngram", "--url takes no option for loading a model"),
        ("--url x --clients 0", "`0` is not a whole number from 1 on."),
        ("--url x --rate 1,0", "`0` is not a number above 0."),
        ("--url x --rate nan", "`nan` is not a number above 0."),
        ("--url x --rate inf", "`inf` is not a number above 0."),
        ("--url x --rate 1,", "`` is not a number above 0."),
        ("--url x --first-token-limit 0", "0.0 is not in the range x>0"),
        ("--url x --first-token-limit inf", "inf is not a finite number."),
        ("", "Missing argument 'MODEL' (or give --url)."),
        ("--clients 2", "Missing argument 'MODEL' (or give --url)."),
        ("model --clients 2", "--clients needs --url."),
        ("model --rate 2", "--rate needs --url."),
        ("model --token-ids", "--token-ids needs --url."),
        ("model --seed 1", "--seed needs --url."),
        ("model --warm-up 0", "--warm-up needs --url."),
        ("model --api-key x", "--api-key needs --url."),
    ],
)
def test_options_that_exclude_each_other(line: str, message: str) -> None:
    result = bench(*line.split())
    assert result.exit_code == 2
    assert message in result.stderr


def test_what_spoils_the_figures_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    load = OfferedLoad(requests=2, rate=3.0)
    answers = [Answered(1.0, 0.5, 0.5, (), 2, None, by_usage=each) for each in (True, False)]
    found = load_result(load, LoadRecord(tuple(answers), 7, 5, 0.25, 0.9), 4, LatencyLimits())
    result = ServerResult(
        url="http://there",
        model="m",
        api="chat",
        token_ids=False,
        prompt_tokens=8,
        new_tokens=4,
        ignore_eos=True,
        seed=1,
        limits=LatencyLimits(),
        notes=(),
        loads=(found,),
    )
    show_server(result)
    said = capsys.readouterr().out
    assert said.splitlines()[-5:] == [
        "3 requests/s: 2 answers have fewer than 4 tokens",
        "3 requests/s: the server does not count tokens; each event with text counts as one",
        "3 requests/s: 5 requests waited, since 7 were under way",
        "3 requests/s: requests were asked up to 250 ms late",
        "3 requests/s: this process computed for 90.0 % of the time and may be the slower side",
    ]
    assert "prompt tokens" not in said  # which the server did not count
    found = replace(found, held=0, most_late_s=0.001, busy_share=0.1, short=0, counted_events=0)
    show_server(replace(result, loads=(found,)))
    assert "3 requests/s: " not in capsys.readouterr().out


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    model = lowbit.load(MODELS / "tiny-qwen3", device="cpu", max_sequences=2, context=256)
    with running(model, api_key="secret") as found:
        yield found


@in_commands("completions")
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_server_of_lowbit(real: Running, api: str) -> None:
    found = measured(real.url, *FEW, "--api", api, "--prompt-tokens", "40", key="secret")
    assert (found["model"], found["ignore_eos"], found["notes"]) == (NAME, True, [])
    [load] = found["loads"]
    assert (load["answered"], load["output_tokens"], load["short"]) == (3, 12, 0)
    assert load["counted_events"] == 0
    assert load["prompt_tokens"] == pytest.approx(40, rel=0.25)


def test_token_ids_of_lowbit(real: Running) -> None:
    found = measured(real.url, NAME, *FEW, "--token-ids", "--prompt-tokens", "33", key="secret")
    assert found["loads"][0]["prompt_tokens"] == 33


def test_model_that_lowbit_does_not_serve(real: Running) -> None:
    result = bench("--url", real.url, "other", *FEW, key="secret")
    assert result.exit_code == 1
    assert "status 404" in result.stderr
    assert "has the server this model?" in result.stderr
