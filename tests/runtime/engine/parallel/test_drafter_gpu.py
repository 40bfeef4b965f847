"""A drafter beside the first of two ranks changes no bit: on two GPUs, or on one in turns."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.convert import Recipe
from lowbit.formats.errors import ResourceError
from lowbit.runtime.engine.draft.block import BlockRounds
from lowbit.runtime.engine.draft.source import Drafts, new_drafts
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.load_options import Mode
from lowbit.runtime.engine.request import Request
from tests.conversions import convert
from tests.drafters import DSPARK, LILICORR, write_drafter
from tests.runtime.engine.draft.guesses import costs_by_tokens
from tests.runtime.engine.small_engine import assert_all_free
from tests.short_models import MODELS

pytestmark = pytest.mark.gpu

TARGET, TRAINED = MODELS / "tiny-qwen3.5", MODELS / "tiny-qwen3.5-dflash"
TEXT = (MODELS.parent / "data" / "stories-eval.txt").read_text()
GREEDY = lowbit.SamplingParams(logprobs=2)
STRICT = lowbit.SamplingParams(0.8, repetition_penalty=1.2, presence_penalty=0.5, seed=3)
GPUS = (0, 1) if torch.cuda.device_count() > 1 else (0, 0)
SIZES: dict[str, Any] = {
    **{"device": "cuda", "context": 1200, "max_sequences": 4, "quantize": "int4"},
    **{"group_size": 64, "tensor_parallel": 2, "devices": GPUS},
}
COUNT = 40
ENDED = r"rank 1 \(process \d+\) ended while running steps: signal SIGKILL"
Answers = list[tuple[list[int], Any]]


def answers(model: lowbit.Model, engine: Engine) -> tuple[Answers, list[int]]:
    """Answers to two requests together, to one alone, and to a turn behind it; their rounds.

    A prompt has several chunks, and half of a page is copied for the turn.
    """
    ids = [
        tuple(model.tokenizer.encode(start, framed=True, context=1200))
        for start in ("Once upon a time, a little robot", TEXT[:4000])
    ]
    handles = [
        engine.submit(Request(some, params, COUNT))
        for some, params in zip(ids, (GREEDY, STRICT), strict=True)
    ]
    found = [handle.result() for handle in handles]
    engine.forget()
    for _ in range(2):
        prompt = ids[0] if len(handles) == 2 else (*ids[0], *found[-1], 9, 8)
        handles.append(engine.submit(Request(prompt, GREEDY, COUNT)))
        found.append(handles[-1].result())
    assert handles[-1].reused
    assert_all_free(engine)
    tokens = [list(each) for each in found]
    scores = [each.log_probabilities for each in handles]
    return list(zip(tokens, scores, strict=True)), [each.tally.rounds for each in handles]


SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"activations": "int8", "kv_cache": "int8"},
}


@pytest.fixture(scope="module", params=SETTINGS)
def plain(request: pytest.FixtureRequest) -> tuple[str, Answers]:
    """Settings, and the answers of both ranks without drafts."""
    options = {**SIZES, **SETTINGS[request.param], "speculate": "off"}
    with closing(lowbit.load(TARGET, **options)) as model:
        return request.param, answers(model, model.engine)[0]


def drafter(kind: str, folder: Path) -> Path:
    """The bundled drafter, or a random one with a head, packed."""
    if kind == "trained":
        return TRAINED
    write_drafter(folder / "source", base=LILICORR if kind == "lilicorr" else DSPARK)
    convert(folder / "source", folder / "packed", Recipe(group_size=32))
    return folder / "packed"


@pytest.fixture(scope="module", params=["trained", "dspark", "lilicorr"])
def model(
    request: pytest.FixtureRequest,
    plain: tuple[str, Answers],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[lowbit.Model]:
    """Two ranks, the first of which has a drafter and its choices from the whole head."""
    folder = drafter(request.param, tmp_path_factory.mktemp("drafter"))
    options = {**SIZES, **SETTINGS[plain[0]], "speculate": "dflash", "drafter": folder}
    with closing(lowbit.load(TARGET, **options, draft_tokens=7)) as model:
        yield model
    assert model.crew is not None
    assert all(member.process.poll() is not None for member in model.crew.members)


def drafting(model: lowbit.Model, mode: Mode) -> Engine:
    """Ranks of a model, with as many drafts as there may be."""
    model.engine.forget()
    engine = Engine(model.engine.runner)
    found = new_drafts(engine.runner, replace(model.options, speculate=mode), 7, model.device)
    assert found is not None
    found.policy.costs = costs_by_tokens(0.0, 0.0)
    engine.drafting = found
    return engine


@pytest.mark.parametrize("mode", ["dflash", "auto"])
def test_drafts_change_no_bit(plain: tuple[str, Answers], model: lowbit.Model, mode: Mode) -> None:
    engine = drafting(model, mode)
    found, rounds = answers(model, engine)
    places = [differing(a, b) for (a, _), (b, _) in zip(plain[1], found, strict=True)]
    assert places == [[], [], [], []], rounds
    assert found == plain[1]  # log-probabilities, too
    assert all(rounds)
    assert isinstance(engine.drafting, Drafts)
    made, graphs = engine.drafting.made, engine.drafting.verifier.graphs
    assert isinstance(made, BlockRounds)
    keys = [key for key in graphs._graphs if isinstance(key, tuple)]
    assert any(key[0] == "made" for key in keys)  # drafts, check and acceptance: one graph
    assert mode == "auto" or all(key[0] == "made" for key in keys)


def differing(a: list[int], b: list[int]) -> list[tuple[int, int, int]]:
    """The first places at which two answers differ, with the tokens of both."""
    pairs = zip(range(len(a)), a, b, strict=True)
    return [(at, x, y) for at, x, y in pairs if x != y][:3]


@pytest.fixture(scope="module")
def trained() -> Iterator[lowbit.Model]:
    options = {**SIZES, "speculate": "dflash", "drafter": TRAINED}
    with closing(lowbit.load(TARGET, **options)) as model:
        yield model


def test_a_trained_drafter_gives_several_tokens_a_round(trained: lowbit.Model) -> None:
    """As many as one GPU and a CPU have of it: it reads whole hidden states."""
    engine = drafting(trained, "dflash")
    ids = trained.tokenizer.encode("Once upon a time", framed=True, context=1200)
    handle = engine.submit(Request(tuple(ids), lowbit.SamplingParams(), 200))
    handle.result()
    assert handle.tally.tokens_a_round is not None
    assert handle.tally.tokens_a_round > 1.8


def test_a_process_that_is_killed_in_a_round_ends_all(trained: lowbit.Model) -> None:
    """The last one here, since the model has ended with it."""
    assert trained.crew is not None
    engine = drafting(trained, "dflash")
    ids = trained.tokenizer.encode("Once upon a time", framed=True, context=1200)
    handle = engine.submit(Request(tuple(ids), lowbit.SamplingParams(), 400))
    for _ in range(5):
        next(handle)
    trained.crew.members[0].process.kill()
    with pytest.raises(ResourceError, match=ENDED):
        list(handle)
    assert trained.crew.problem is not None
