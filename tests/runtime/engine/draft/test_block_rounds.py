"""Rounds by a block drafter as a GPU runs them, without a GPU, as in `test_mtp_rounds`.

The drafter's pass is part of a round, and a round of one graph.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.engine.draft.block import BlockRounds
from lowbit.runtime.engine.draft.ngram import LONGEST_MATCH
from lowbit.runtime.engine.draft.source import Drafts
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import Handle
from tests.drafters import DSPARK, LILICORR, XPRESS, write_drafter
from tests.lanes import in_commands
from tests.runtime.engine.draft.guesses import Guesser, costs_by_tokens, join_copies
from tests.runtime.engine.graph_stand_in import run_through_graphs
from tests.runtime.engine.residues import Later, Residues, follows
from tests.short_models import Shorten

EXAMPLES = Path(__file__).parents[4] / "examples"
MODELS = EXAMPLES / "models"
GREEDY = lowbit.SamplingParams(logprobs=2)
HOT = lowbit.SamplingParams(0.9, top_k=40, top_p=0.95, seed=5, logprobs=1)
STRICT = lowbit.SamplingParams(0.8, repetition_penalty=1.2, presence_penalty=0.5, seed=3)
CONTEXT = 400
Pairs = dict[str, tuple[Path, Path]]


def load(folder: Path, drafter: Path | None, drafts: int | None = None) -> lowbit.Model:
    return lowbit.load(
        folder,
        device="cpu",
        dtype=torch.float32,
        context=CONTEXT,
        max_sequences=8,
        speculate="off" if drafter is None else "dflash",
        drafter=drafter,
        draft_tokens=drafts,
    )


@pytest.fixture(scope="module")
def folders(shorten: Shorten, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """A trained pair, and a model with random drafters, with a window or DSpark's, always wrong."""
    random = tmp_path_factory.mktemp("drafter")
    section = {"mask_token_id": 1000, "target_layer_ids": [0]}
    write_drafter(random, dflash_config=section, num_target_layers=2)
    trained = MODELS / "tiny-qwen3.5", MODELS / "tiny-qwen3.5-dflash"
    dspark = tmp_path_factory.mktemp("dspark")
    write_drafter(dspark, base=DSPARK, target_layer_ids=[0], num_target_layers=2)
    short = shorten("tiny-qwen3")
    pairs = {"trained": trained, "random": (short, random), "dspark": (short, dspark)}
    for name, base in (("xpress", XPRESS), ("lilicorr", LILICORR)):
        folder, own = tmp_path_factory.mktemp(name), base["dflash_config"] | section
        write_drafter(folder, base=base, dflash_config=own, num_target_layers=2)
        pairs[name] = short, folder
    return pairs


@pytest.fixture(scope="module")
def plains(folders: Pairs) -> dict[Path, lowbit.Model]:
    return {model: load(model, None) for model in {model for model, _ in folders.values()}}


Answer = Callable[[lowbit.Model, Request], Handle]


@pytest.fixture(scope="module")
def answer() -> Answer:
    """`answer(plain, request)` is a plain model's, which runs it once for all drafters."""
    known: dict[tuple[Path, Request], Handle] = {}

    def answered(plain: lowbit.Model, request: Request) -> Handle:
        key = plain.folder, request
        if key not in known:
            known[key] = plain.engine.submit(request)
            known[key].result()
        return known[key]

    return answered


@pytest.fixture(params=["trained-7"])
def models(
    request: pytest.FixtureRequest,
    folders: Pairs,
    plains: dict[Path, lowbit.Model],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[lowbit.Model, lowbit.Model]:
    """A plain model, and one with so many drafts whose rounds go through graphs.

    Copies join its drafts where the pair's name ends in `joined`.
    """
    name, drafts, *joined = request.param.split("-")
    plain = plains[folders[name][0]]
    plain.engine.forget()
    drafting = always_drafting(load(*folders[name], int(drafts)), monkeypatch)
    if joined:
        join_copies(drafting)
    return plain, drafting


def by(*pairs: str) -> pytest.MarkDecorator:
    """The pairs of a model and a drafter, and the number of drafts."""
    return pytest.mark.parametrize("models", pairs, indirect=True)


def always_drafting(model: lowbit.Model, monkeypatch: pytest.MonkeyPatch) -> lowbit.Model:
    """Always with as many drafts as there may be."""
    run_through_graphs(model, monkeypatch)
    assert isinstance(model.engine.drafting, Drafts)
    assert isinstance(model.engine.drafting.made, BlockRounds)
    model.engine.drafting.policy.costs = costs_by_tokens(0.0, 0.0)
    return model


def asked(model: lowbit.Model, count: int = 14) -> list[Request]:
    text = (EXAMPLES / "data" / "stories-eval.txt").read_text()
    starts = ("Once upon a time, a little robot", text[:700], "Lily", text[2000:2100])
    params = (GREEDY, HOT, STRICT, replace(HOT, seed=6))
    ids = [model.tokenizer.encode(start, framed=True, context=CONTEXT) for start in starts]
    return [Request(tuple(some), each, count) for some, each in zip(ids, params, strict=True)]


def assert_same(found: Handle, expected: Handle) -> None:
    assert found.result() == expected.result()
    assert found.log_probabilities == expected.log_probabilities
    assert found.finish_reason == expected.finish_reason


def keys_of(model: lowbit.Model) -> list[Any]:
    drafting: Any = model.engine.drafting
    return list(drafting.verifier.graphs._graphs)


@in_commands("xpress-7-*", "lilicorr-7-*", "trained-15-joined-*")
@pytest.mark.parametrize(
    ("models", "chosen"),
    [
        ("trained-7", (0, 2)),  # greedy, with penalties; those behind it are hot
        ("dspark-7", (1,)),
        ("xpress-7", (2,)),
        ("lilicorr-7", (1,)),
        ("trained-15-joined", (0, 2)),
    ],
    indirect=["models"],
)
def test_rounds_that_follow_each_other_change_nothing(
    models: tuple[lowbit.Model, lowbit.Model], chosen: tuple[int, ...], answer: Answer
) -> None:
    """Alone, and in the turn after, which begins with what the rounds have left."""
    plain, drafting = models
    for request in (asked(plain, 12)[number] for number in chosen):
        found = drafting.engine.submit(request)
        assert_same(found, answer(plain, request))
        assert found.tally.rounds > 2
        turn = replace(request, prompt=(*request.prompt, *found.result(), 9, 8), max_new_tokens=6)
        found = drafting.engine.submit(turn)
        assert_same(found, answer(plain, turn))
        assert found.reused


def test_a_round_is_one_graph(models: tuple[lowbit.Model, lowbit.Model]) -> None:
    """Draft, check and acceptance; nothing is recorded beside it."""
    plain, drafting = models
    [request, *_] = asked(plain, 24)
    before = len(keys_of(drafting))
    handle = drafting.engine.submit(request)
    handle.result()
    found = keys_of(drafting)[before:]
    assert {key[0] for key in found} == {"made"}
    assert {key[3] for key in found} <= {7, 3, 1}  # drafts, fewer at the end
    assert handle.tally.rounds > 5


@in_commands("lilicorr-7")
@by("trained-7", "lilicorr-7")
def test_drafts_behind_rounds_are_those_behind_plain_steps(
    models: tuple[lowbit.Model, lowbit.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's context is complete, whatever steps have brought it there."""
    plain, drafting = models
    made: list[tuple[int, list[int]]] = []
    draft = BlockRounds.draft

    def noted(rounds: BlockRounds, B: int, k: int, max_kv_len: int) -> torch.Tensor:
        first = int(rounds.inputs.step.positions[0])
        found = draft(rounds, B, k, max_kv_len)
        made.append((first, found[0, :3].tolist()))
        return found

    monkeypatch.setattr(BlockRounds, "draft", noted)
    [request, *_] = asked(plain, 24)
    drafts: Any = drafting.engine.drafting
    rounds = drafts.made
    of_pauses = []
    for pause in (0, 8):
        drafting.engine.forget()
        made.clear()
        handle = drafting.engine.submit(request)
        next(handle)
        drafts.made = None  # plain steps
        for _ in range(pause):
            next(handle)
        drafts.made = rounds
        handle.result()
        of_pauses.append(dict(made))
    both = of_pauses[0].keys() & of_pauses[1].keys() - {0}
    assert len(both) >= 3
    assert all(of_pauses[0][at] == of_pauses[1][at] for at in both)


@in_commands("random-7")
@by("random-7", "dspark-15-joined")
def test_sequences_that_come_and_go_change_nothing(
    models: tuple[lowbit.Model, lowbit.Model], answer: Answer
) -> None:
    plain, drafting = models
    requests = [replace(each, max_new_tokens=10 + 2 * at) for at, each in enumerate(asked(plain))]
    expected = [answer(plain, request) for request in requests]
    first = drafting.engine.submit(requests[0])
    begun = [next(first) for _ in range(6)]
    others = [drafting.engine.submit(request) for request in requests[1:]]
    left = drafting.engine.submit(replace(requests[1], max_new_tokens=50))
    next(left)
    left.cancel()
    assert [*begun, *first] == list(expected[0].result())
    for found, one in zip(others, expected[1:], strict=True):
        assert_same(found, one)
    assert {key[2] for key in keys_of(drafting) if key[0] == "made"} > {1}  # sequences


FIRST = 66  # masked token; from 64 free tokens on drafts are made


def masked(model: lowbit.Model) -> list[Handle]:
    """Two answers of a model together, whose last tokens are masked."""
    requests = asked(model, FIRST + 6)[:2]
    handles = [model.engine.submit(replace(each, constraint=Later(FIRST))) for each in requests]
    for handle in handles:
        handle.result()
    return handles


@pytest.fixture(scope="module")
def plainly_masked(folders: Pairs, plains: dict[Path, lowbit.Model]) -> list[Handle]:
    """Those of the model that has the random drafters."""
    return masked(plains[folders["random"][0]])


@pytest.mark.commands  # `test_mtp_rounds` has it of a head
@by("dspark-2", "random-2-joined")
def test_drafts_end_before_the_first_mask(
    models: tuple[lowbit.Model, lowbit.Model], plainly_masked: list[Handle]
) -> None:
    _, drafting = models
    for expected, drafted in zip(plainly_masked, masked(drafting), strict=True):
        assert_same(drafted, expected)
        assert follows(drafted.result()[FIRST:])
        assert drafted.tally.rounds > 10


@by("random-2")
def test_a_constrained_sequence_keeps_the_others_from_drafts(
    models: tuple[lowbit.Model, lowbit.Model],
) -> None:
    plain, drafting = models
    [request, *_] = asked(plain, 20)
    expected = plain.engine.submit(request).result()
    free = drafting.engine.submit(request)
    limited = drafting.engine.submit(Request(request.prompt, HOT, 50, constraint=Residues()))
    for _ in range(6):
        next(limited)
    assert free.tally.rounds == 0
    limited.cancel()
    assert free.result() == expected
    assert free.tally.rounds > 2


@pytest.mark.commands  # right and wrong ones join below
@by("trained-15-joined")
def test_copies_join_drafts(models: tuple[lowbit.Model, lowbit.Model]) -> None:
    """A prompt says everything twice; the answer may go on so or not."""
    plain, drafting = models
    copied = 0
    for request in asked(plain, 30)[1:3]:
        twice = replace(request, prompt=request.prompt[:150] * 2)
        expected, found = plain.engine.submit(twice), drafting.engine.submit(twice)
        assert_same(found, expected)
        if "copied" in found.tally.sources:
            copied += found.tally.sources["copied"].drafted
    assert copied
    assert {key[-1] for key in keys_of(drafting) if key[0] == "made"} == {False, True}


@in_commands("xpress-15-joined")
@by("random-15-joined", "xpress-15-joined")
def test_right_copies_come_in_long_blocks_though_the_host_is_a_round_behind(
    models: tuple[lowbit.Model, lowbit.Model], answer: Answer
) -> None:
    plain, drafting = models
    [request, *_] = asked(plain, 80)
    truth = answer(plain, request).result()
    noted: list[tuple[int, int]] = []
    long = (*truth, *[5] * 32)  # copies go on behind the answer
    known = Guesser(long, lambda most: (most, most), notes=noted, match_length=LONGEST_MATCH)
    join_copies(drafting, lambda ids: known)
    found = drafting.engine.submit(request)
    assert found.result() == truth
    drafts = [count for count, _ in noted]
    assert drafts[:2] == [7, 7]
    assert 15 in drafts[2:5]
    assert all(accepted == count for count, accepted in noted[:-2])
    assert found.tally.sources["copied"].rounds == found.tally.rounds
    assert found.tally.tokens_a_round is not None
    assert found.tally.tokens_a_round > 9


@by("random-7-joined")
def test_wrong_copies_leave_what_a_drafter_made(
    models: tuple[lowbit.Model, lowbit.Model],
) -> None:
    """Short matches, of which the drafter agrees with none; drafts are counted as its own."""
    plain, drafting = models
    [request, *_] = asked(plain, 30)
    truth = plain.engine.submit(request).result()
    known = Guesser((*truth, *[5] * 40), lambda most: (most, 0), wrong=3, match_length=3)
    join_copies(drafting, lambda ids: known)
    found = drafting.engine.submit(request)
    assert found.result() == truth
    assert set(found.tally.sources) == {"drafter"}
    assert any(key[-1] for key in keys_of(drafting))
