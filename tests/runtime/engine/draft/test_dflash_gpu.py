"""Block drafters on a GPU: hidden states by plain torch, one graph a round, the same answers."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.convert import Recipe
from lowbit.formats.kv_cache import BF16_CACHE
from lowbit.runtime.engine.draft.block import BlockRounds
from lowbit.runtime.engine.draft.ngram import LONGEST_MATCH
from lowbit.runtime.engine.draft.source import Drafts
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.load_options import Mode
from lowbit.runtime.engine.request import Request
from lowbit.runtime.models import dspark
from lowbit.runtime.models.loader import load_drafter, open_model, with_drafter
from lowbit.runtime.state.device_state import kv_pages
from lowbit.runtime.state.step_buffers import lone_step
from tests.conversions import convert
from tests.drafters import (
    CONFIG,
    DFLASH2,
    DOMINO,
    DSPARK,
    LILICORR,
    XPRESS,
    hidden_by_torch,
    write_drafter,
)
from tests.oracle import dequantized_weights
from tests.runtime.engine.draft.guesses import Guesser, costs_by_tokens, join_copies

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[4] / "examples"
MODELS = EXAMPLES / "models"
TARGET, TRAINED = MODELS / "tiny-qwen3.5", MODELS / "tiny-qwen3.5-dflash"
TEXT = (EXAMPLES / "data" / "stories-eval.txt").read_text()
GREEDY = lowbit.SamplingParams(logprobs=2)
HOT = lowbit.SamplingParams(0.9, top_k=40, top_p=0.95, seed=5, logprobs=1)
STRICT = lowbit.SamplingParams(0.8, repetition_penalty=1.2, presence_penalty=0.5, seed=3)
CONTEXT, COUNT = 1200, 60


def load(drafter: Path | None, mode: Mode = "dflash", **options: Any) -> lowbit.Model:
    return lowbit.load(
        TARGET,
        device="cuda",
        speculate="off" if drafter is None else mode,
        drafter=drafter,
        **{"quantize": "int4", "context": CONTEXT, "max_sequences": 16, **options},
    )


@pytest.mark.parametrize("packed", [False, True], ids=["stored", "packed"])
@pytest.mark.parametrize("parts", [(45,), (30, 1, 1, 5, 8)])
def test_hidden_states_are_those_of_plain_torch(
    tmp_path: Path, packed: bool, parts: tuple[int, ...]
) -> None:
    """Behind a context that came in parts, beyond the window of the first layer."""
    weights, folder = write_drafter(tmp_path / "source"), tmp_path / "source"
    if packed:
        folder = tmp_path / "packed"
        convert(tmp_path / "source", folder, Recipe(group_size=32))
        weights = dequantized_weights(folder)
    opened = with_drafter(open_model(TARGET), folder)
    drafter, _ = load_drafter(opened, "cuda", torch.bfloat16, 64)
    generator = torch.Generator().manual_seed(1)
    outputs, block = (
        torch.randn(n, h, generator=generator).bfloat16() for n, h in ((45, 512), (8, 256))
    )
    pages = kv_pages(drafter.config, 4, BF16_CACHE, "cuda")
    first = 0
    for count in parts:
        step = lone_step(count, "cuda", first, prompt=count > 16)
        drafter.read(outputs[first : first + count].cuda(), pages, step)
        first += count
    before = pages.k.clone()
    found = drafter.hidden(block.cuda(), pages, lone_step(8, "cuda", 45, prompt=False))
    assert torch.equal(pages.k, before)  # a block leaves nothing
    expected = hidden_by_torch(CONFIG, weights, outputs.float(), block.float())
    normed = drafter.ops.rms_norm(found, drafter.norm, 1e-6).float().cpu()
    assert (normed - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("packed", [False, True], ids=["stored", "packed"])
def test_the_bias_of_dspark_is_that_of_plain_torch(tmp_path: Path, packed: bool) -> None:
    weights, folder = write_drafter(tmp_path / "source", base=DSPARK), tmp_path / "source"
    if packed:
        folder = tmp_path / "packed"
        convert(tmp_path / "source", folder, Recipe(group_size=32))
        weights = dequantized_weights(folder)
    drafter, _ = load_drafter(with_drafter(open_model(TARGET), folder), "cuda", torch.bfloat16, 64)
    assert isinstance(drafter.head, dspark.Markov)
    ids = torch.tensor([5, 4095, 7, 7])
    found = drafter.head.bias(ids.cuda())[:, :4096].cpu()
    first, second = (weights[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
    expected = first[ids] @ second.T
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.fixture(scope="module")
def plain() -> lowbit.Model:
    return load(None)


HEADS = {
    "dspark": DSPARK,
    "dflash2": DFLASH2,
    "domino": DOMINO,
    "lilicorr": LILICORR,
    "xpress": XPRESS,
}
KINDS = ["trained", "packed", "random", "dspark", *(f"{kind} packed" for kind in HEADS)]


@pytest.fixture(scope="module", params=KINDS)
def drafting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> lowbit.Model:
    """The bundled drafter in BF16 and packed, and random ones: with a window, and other heads."""
    folder = tmp_path_factory.mktemp("drafter") / request.param
    if request.param == "trained":
        folder = TRAINED
    elif request.param == "packed":
        convert(TRAINED, folder, Recipe())
    elif request.param == "dspark":
        write_drafter(folder, base=DSPARK)
    elif request.param.endswith(" packed"):
        write_drafter(folder / "source", base=HEADS[request.param.removesuffix(" packed")])
        convert(folder / "source", folder / "packed", Recipe(group_size=32))
        folder /= "packed"
    else:
        write_drafter(folder)
    return always_drafting(load(folder))


def always_drafting(model: lowbit.Model) -> lowbit.Model:
    """Always with as many drafts as there may be."""
    assert isinstance(model.engine.drafting, Drafts)
    assert isinstance(model.engine.drafting.made, BlockRounds)
    model.engine.drafting.policy.costs = costs_by_tokens(0.0, 0.0)
    return model


def requests(model: lowbit.Model, count: int = COUNT) -> list[Request]:
    starts = ("Once upon a time, a little robot", TEXT[:700], "Lily", TEXT[2000:4100])
    params = (GREEDY, HOT, STRICT, replace(HOT, seed=6))
    ids = [model.tokenizer.encode(start, framed=True, context=CONTEXT) for start in starts]
    return [Request(tuple(some), each, count) for some, each in zip(ids, params, strict=True)]


@pytest.mark.parametrize("kind", ["trained", "dspark"])
def test_copies_join_drafts(tmp_path: Path, plain: lowbit.Model, kind: str) -> None:
    """Copies of a prompt that says all twice, then right ones, in blocks longer than a drafter's.

    Rounds follow each other, so the host is one behind.
    """
    if kind == "dspark":
        write_drafter(tmp_path, base=DSPARK)
    model = load(TRAINED if kind == "trained" else tmp_path, draft_tokens=15)
    plain.engine.forget()
    join_copies(model)
    for request in requests(plain):
        twice = replace(request, prompt=request.prompt[:300] * 2)
        assert answer(model, twice) == answer(plain, twice)
    [request, *_] = requests(plain, 120)
    truth = answer(plain, request)
    long = (*truth[0], *[5] * 32)
    known = Guesser(long, lambda most: (most, most), match_length=LONGEST_MATCH)
    join_copies(model, lambda ids: known)
    handle = model.engine.submit(request)
    assert (handle.result(), handle.log_probabilities) == truth
    assert handle.tally.sources["copied"].rounds == handle.tally.rounds
    assert handle.tally.tokens_a_round is not None
    assert handle.tally.tokens_a_round > 9


SETTINGS: list[dict[str, Any]] = [
    {},
    {"kv_cache": "int8"},
    {"activations": "int8"},
    {"kv_cache": "int8", "activations": "int8"},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_joined_copies_change_nothing(options: dict[str, Any]) -> None:
    """Company of up to twelve comes and goes, and prompts have several chunks."""
    given = {"context": 4096, **options}
    plain, drafting = load(None, **given), always_drafting(load(TRAINED, draft_tokens=15, **given))
    join_copies(drafting)
    some = [
        replace(each, prompt=each.prompt[: 120 + 30 * at] * 2, max_new_tokens=20 + 7 * at)
        for at in range(3)
        for each in requests(plain)
    ]
    ids = plain.tokenizer.encode(TEXT[:8000], framed=True, context=4096)[:1750]
    some.append(replace(some[0], prompt=(*ids, *ids), max_new_tokens=100))
    expected = [plain.engine.submit(request) for request in some]
    for handle in expected:
        handle.result()
    found = []
    for request in some:
        found.append(drafting.engine.submit(request))
        for _ in range(3):
            drafting.engine.step()
    left = drafting.engine.submit(replace(some[0], max_new_tokens=200))
    next(left)
    left.cancel()
    for handle, one in zip(found, expected, strict=True):
        assert handle.result() == one.result()
        assert handle.log_probabilities == one.log_probabilities
    counts = [each.tally.sources.get("copied") for each in found]
    assert any(count is not None for count in counts)  # one in eight bits, several else
    assert "activations" in options or counts[-1] is not None  # far on
    again = drafting.engine.submit(replace(some[-1], prompt=(*some[-1].prompt, *ids[:200])))
    turn = plain.engine.submit(replace(some[-1], prompt=(*some[-1].prompt, *ids[:200])))
    assert again.result() == turn.result()
    assert again.reused == turn.reused > 2000  # a snapshot at least as far as the first chunk


def answer(model: lowbit.Model, request: Request) -> tuple[Any, ...]:
    handle = model.engine.submit(request)
    return handle.result(), handle.log_probabilities


def test_drafts_change_nothing(plain: lowbit.Model, drafting: lowbit.Model) -> None:
    """Greedy, drawn and penalized, alone, in the next turn, and all together."""
    for model in (plain, drafting):
        model.engine.forget()
    alone = []
    for request in requests(plain):
        alone.append(answer(plain, request))
        found = drafting.engine.submit(request)
        assert (found.result(), found.log_probabilities) == alone[-1]
        assert found.tally.rounds > 3
        turn = replace(request, prompt=(*request.prompt, *found.result(), 9, 8), max_new_tokens=20)
        again = drafting.engine.submit(turn)
        assert again.result() == answer(plain, turn)[0]
        assert again.reused
    for count in (2, 4, 16):
        drafting.engine.forget()
        some = (4 * requests(drafting))[:count]
        handles = [drafting.engine.submit(request) for request in some]
        found_together = [(each.result(), each.log_probabilities) for each in handles]
        assert found_together == (4 * alone)[:count]


@pytest.mark.parametrize("mode", ["dflash", "auto"])
@pytest.mark.parametrize("options", [{"kv_cache": "int8"}, {"activations": "int8"}], ids=str)
def test_drafts_change_nothing_in_other_settings(mode: Mode, options: dict[str, Any]) -> None:
    """With the number of drafts that pays, for many sequences too."""
    plain, drafting = load(None, **options), load(TRAINED, mode, **options)
    some = [
        replace(each, max_new_tokens=25 + 5 * at) for at in range(3) for each in requests(plain)
    ]
    expected = [plain.engine.submit(request) for request in some]
    found = [drafting.engine.submit(request) for request in some]
    assert [each.result() for each in found] == [each.result() for each in expected]


def test_a_round_is_one_graph(
    drafting: lowbit.Model, plain: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft, check and acceptance, replayed once a round; nothing is launched beside it."""
    [request, *_] = requests(drafting)
    rounds: Any = drafting.engine.drafting
    drafting.engine.forget()
    expected = answer(plain, request)
    assert answer(drafting, request) == expected  # every graph is recorded
    keys = {key for key in rounds.verifier.graphs._graphs if key[0] == "made" and key[2] == 1}
    assert {key[3] for key in keys} <= {7, 3, 1}  # drafts
    replayed: list[Any] = []
    replay = Graphs.replay

    def noted(graphs: Graphs, key: Any, step: Any) -> None:
        replayed.append(key)
        replay(graphs, key, step)

    monkeypatch.setattr(Graphs, "replay", noted)
    monkeypatch.setattr(BlockRounds, "draft", lambda *given: pytest.fail("launched"))
    drafting.engine.forget()
    handle = drafting.engine.submit(request)
    assert (handle.result(), handle.log_probabilities) == expected
    made = [key for key in replayed if isinstance(key, tuple) and key[0] == "made"]
    assert handle.tally.rounds <= len(made) <= handle.tally.rounds + 1  # one may be sent in vain


def test_the_host_waits_for_tokens_alone(drafting: lowbit.Model) -> None:
    """Prompts, rounds and changes of company, once every step is recorded."""

    def ask() -> list[tuple[int, ...]]:
        drafting.engine.forget()
        handles = []
        for place, request in enumerate(requests(drafting)[:3]):
            handles.append(drafting.engine.submit(replace(request, max_new_tokens=30 + place)))
            for _ in range(5):
                drafting.engine.step()
        return [handle.result() for handle in handles]

    expected = ask()
    ask()  # page-locked memory for everything that is under way
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        assert ask() == expected
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_a_trained_drafter_gives_several_tokens_a_round() -> None:
    """As many as on a CPU."""
    model = always_drafting(load(TRAINED))
    ids = model.tokenizer.encode("Once upon a time", framed=True, context=CONTEXT)
    handle = model.engine.submit(Request(tuple(ids), GREEDY, 200))
    handle.result()
    assert handle.tally.tokens_a_round is not None
    assert handle.tally.tokens_a_round > 1.8
