"""Chunks of several prompts that pass the layers together, with a stand-in for their graphs.

`test_packs_gpu` runs the real ones.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.engine.packs import PackLimits, fill_pack, is_short
from lowbit.runtime.engine.plan import CHUNK
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.thresholds import (
    EXACT_TOKENS,
    PACK_SEQUENCES,
    SEQUENCE_TOKENS,
    STEP_TOKENS,
)
from tests.lanes import in_commands
from tests.runtime.engine.graph_stand_in import run_through_graphs

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

CONTEXT, ROWS = 256, 6
IDS = torch.randint(255, (9, 250), generator=torch.Generator().manual_seed(7)).tolist()
END = 255  # token that ends a message
ENDS = frozenset({END})
LIMITS = PackLimits(1024, None, CHUNK)
LOGPROBS = lowbit.SamplingParams(logprobs=2)
Packs = list[tuple[int, ...]]  # tokens of each sequence of a chunk


@pytest.fixture(params=["dense", "hybrid"])
def fresh(
    request: pytest.FixtureRequest,
    make_model: "Callable[..., PackedModel]",
    make_qwen3_5: "Callable[..., PackedModel]",
) -> Callable[..., lowbit.Model]:
    """A model that has seen nothing."""
    folder = (make_model if request.param == "dense" else make_qwen3_5)().folder

    def load(**options: Any) -> lowbit.Model:
        sizes = {"context": CONTEXT, "max_sequences": ROWS}
        return lowbit.load(folder, device="cpu", dtype=torch.float32, **(sizes | options))

    return load


@pytest.fixture
def graphs(
    fresh: Callable[..., lowbit.Model], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., lowbit.Model]:
    """A model whose steps and chunks go through graphs."""

    def load(exact: bool = False, **options: Any) -> lowbit.Model:
        model = fresh(**options)
        run_through_graphs(model, monkeypatch)
        if not exact:  # as on a GPU with activations in eight bits
            model.engine.runner.part_tokens = STEP_TOKENS
        return model

    return load


def ask(model: lowbit.Model, ids: list[int], **given: Any) -> Handle:
    return model.engine.submit(Request(tuple(ids), LOGPROBS, 5, message_ends=ENDS, **given))


def message(ids: list[int], count: int, more: int) -> list[int]:
    """A prompt of a message of so many tokens and its end, and more behind it."""
    small = [id % END for id in ids]
    return [*small[:count], END, *small[count : count + more]]


def answer(handle: Handle) -> tuple[Any, ...]:
    tokens = handle.result()
    return tokens, list(handle.log_probabilities), handle.prompt_log_probabilities


def alone(model: lowbit.Model, prompts: list[list[int]]) -> list[tuple[Any, ...]]:
    found = []
    for ids in prompts:
        model.engine.forget()
        found.append(answer(ask(model, ids)))
    return found


@in_commands("hybrid-False", "dense-True", "dense-False")
@pytest.mark.parametrize("exact", [False, True])
def test_prompts_that_pass_together_are_answered_as_if_alone(
    graphs: Callable[..., lowbit.Model],
    fresh: Callable[..., lowbit.Model],
    packs: Packs,
    exact: bool,
) -> None:
    counts = (70, 30, 90, 20, 17, 3, 9, 40) if exact else (90, 85, 100, 3, 95, 12)
    prompts = [ids[:count] for ids, count in zip(IDS, counts, strict=False)]
    expected = alone(fresh(), prompts)
    model = graphs(exact=exact)
    for _ in range(3):  # launched, recorded, replayed
        model.engine.forget()
        packs.clear()
        handles = [ask(model, ids) for ids in prompts]
        assert [answer(each) for each in handles] == expected
        assert sum(map(len, packs)) == len(prompts)
        if exact:
            assert packs[:4] == [(70,), (30, 20), (90,), (17,)]
        else:
            assert packs == [(90, 85, 100, 95), (3, 12)]


def test_drafts_read_what_passed_together(
    graphs: Callable[..., lowbit.Model], packs: Packs, fresh: Callable[..., lowbit.Model]
) -> None:
    prompts = [ids[:count] for ids, count in zip(IDS, (90, 85, 100), strict=False)]
    expected = alone(fresh(), prompts)
    model = graphs(speculate="ngram")
    assert [answer(each) for each in [ask(model, ids) for ids in prompts]] == expected
    assert packs == [(90, 85, 100)]


def test_the_chunks_of_prompts_pass_together_one_after_another(
    graphs: Callable[..., lowbit.Model], fresh: Callable[..., lowbit.Model], packs: Packs
) -> None:
    prompts = [message(IDS[0], 90, 9), message(IDS[1], 84, 9)]
    expected = alone(fresh(), prompts)
    model = graphs()
    assert [answer(each) for each in [ask(model, ids) for ids in prompts]] == expected
    assert packs == [(91, 85), (9, 9)]


def test_a_prompt_that_begins_like_one_that_runs_waits_for_the_cache(
    graphs: Callable[..., lowbit.Model], packs: Packs
) -> None:
    model = graphs()
    begin = message(IDS[0], 99, 0)
    handles = [ask(model, [*begin, *message(ids, 40, 0)[:-1]]) for ids in IDS[:4]]
    for each in handles:
        each.result()
    assert packs == [(100,), (40,), (40, 40, 40)]


def test_the_cache_is_looked_through_once_while_a_prompt_waits(
    graphs: Callable[..., lowbit.Model], packs: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in each step: it takes milliseconds where prompts are long."""
    model = graphs()
    scheduler = model.engine.scheduler
    scheduler.capacity = replace(scheduler.capacity, chunk=80)
    known = Mock(side_effect=scheduler.blocks.known)
    monkeypatch.setattr(scheduler.blocks, "known", known)
    begin = [id for ids in IDS[:3] for id in message(ids, 69, 0)]
    handles = [ask(model, [*begin, *ids[:9]]) for ids in IDS[4:6]]
    for each in handles:
        each.result()
    assert packs == [(70,)] * 3 + [(9,)] * 2
    assert known.call_count == 1


def test_a_prompt_does_not_wait_for_what_the_cache_will_not_have(
    graphs: Callable[..., lowbit.Model], packs: Packs
) -> None:
    """Prompts of one message are cut nowhere that they have in common."""
    model = graphs()
    handles = [ask(model, [*IDS[0][:99], *ids[:40]]) for ids in IDS[1:5]]
    for each in handles:
        each.result()
    assert packs == [(139,) * 4]


@pytest.mark.parametrize("what", ["logprobs", "salt"])
def test_what_passes_alone(graphs: Callable[..., lowbit.Model], packs: Packs, what: str) -> None:
    model = graphs()
    given = {"prompt_logprobs": 1} if what == "logprobs" else {}
    salts = [{"salt": b"a"}, {"salt": b"b"}] if what == "salt" else [{}, {}]
    same = message(IDS[0], 80, 19)
    prompts = [same, same] if what == "salt" else [IDS[0][:70], IDS[1][:70]]
    handles = [ask(model, ids, **given, **salt) for ids, salt in zip(prompts, salts, strict=True)]
    for each in handles:
        each.result()
    assert packs == ([(70,), (70,)] if what == "logprobs" else [(81, 81), (19, 19)])


def test_a_cancelled_prompt_leaves_its_pack(
    graphs: Callable[..., lowbit.Model], fresh: Callable[..., lowbit.Model], packs: Packs
) -> None:
    prompts = [message(ids, 100, 9) for ids in IDS[:3]]
    [expected] = alone(fresh(), prompts[2:])
    model = graphs()
    model.engine.scheduler.capacity = replace(model.engine.scheduler.capacity, chunk=202)
    handles = [ask(model, ids) for ids in prompts]
    model.engine.step()  # the first chunks of two, and nothing of the third
    assert [len(each) for each in packs] == [2]
    assert len(model.engine.scheduler.prompts) == 2
    handles[0].cancel()
    assert answer(handles[2]) == expected
    assert packs[1:] == [(9,), (101,), (9,)]
    assert not model.engine.scheduler.running
    assert handles[0]._sequence.finish == "cancelled"


def sequence(count: int, length: int = 0, **given: Any) -> Sequence:
    made = Sequence(Request((1,) * (length + count), **given), count=1, seed=0)
    made.length = length
    return made


@pytest.mark.parametrize(
    ("counts", "taken"),
    [
        ([100, 200, 300], 3),
        ([100, 64], 2),
        ([17, 30, 17], 3),
        ([16, 16, 16, 16], 4),
        ([16, 17], 1),
        ([16, 16, 16, 16, 1], 4),
        ([1] * 20, PACK_SEQUENCES),
        ([600, 500, 424], 2),
    ],
)
def test_a_pack_has_chunks_of_one_kind(counts: list[int], taken: int) -> None:
    given = [sequence(count) for count in counts]
    waiting = given[1:]
    prompts = given[:1]

    def open_beside() -> Sequence | None:
        if not waiting:
            return None
        prompts.append(waiting.pop(0))
        return prompts[-1]

    found = fill_pack(prompts, LIMITS, open_beside)
    assert found[0] is given[0]
    assert len(found) == taken
    assert len({is_short(each) for each in found}) == 1
    total = sum(each.next_count for each in found)
    assert total <= (EXACT_TOKENS if counts[0] <= SEQUENCE_TOKENS else 1024)


def test_a_pack_has_no_more_keys_than_can_be_widened() -> None:
    given = [sequence(100, length) for length in (0, 400, 700)]
    assert fill_pack(given, PackLimits(1024, 700, CHUNK), lambda: None) == given[:2]
    assert fill_pack(given, LIMITS, lambda: None) == given


def test_a_pack_is_opened_no_further_than_it_may_grow() -> None:
    prompts = [sequence(600)]
    asked = []

    def open_beside() -> Sequence | None:
        asked.append(1)
        prompts.append(sequence(300))
        return prompts[-1]

    assert len(fill_pack(prompts, LIMITS, open_beside)) == 2
    assert len(prompts) <= PACK_SEQUENCES


@pytest.mark.parametrize(("count", "more"), [(300, 4), (500, 3), (1000, 2), (2000, 1)])
def test_few_prompts_that_do_not_fit_are_given_room(count: int, more: int) -> None:
    prompts = [sequence(1000)]

    def open_beside() -> Sequence | None:
        prompts.append(sequence(count))
        return prompts[-1]

    for _ in range(2):
        assert fill_pack(prompts, LIMITS, open_beside) == prompts[:1]
        assert len(prompts) == 1 + more


@pytest.mark.parametrize(
    ("tokens", "taken"), [(1000, PACK_SEQUENCES), (64 + 4 * CHUNK, 5), (40_000, 2)]
)
def test_few_prompts_of_which_much_is_left_are_given_room(tokens: int, taken: int) -> None:
    def begun(tokens: int) -> Sequence:
        made = sequence(tokens)
        made.chunk_ends = [64]
        return made

    prompts = [begun(40_000)]

    def open_beside() -> Sequence | None:
        prompts.append(begun(tokens))
        return prompts[-1]

    assert len(fill_pack(prompts, LIMITS, open_beside)) == len(prompts) == taken


def test_a_client_that_comes_later_waits_for_no_queue_of_another(
    graphs: Callable[..., lowbit.Model],
) -> None:
    model = graphs()
    engine = model.engine
    engine.runner.chunk_tokens = 80
    engine.scheduler.capacity = engine.runner.capacity
    engine.scheduler.restart()
    many = [ask(model, ids[:230], client="many") for ids in IDS[:5]]
    while not many[0].begun:
        engine.step()
    other = ask(model, IDS[5][:100], client="other")
    while not other.begun:
        engine.step()
    assert sum(each.begun for each in many) <= 2
    for each in (*many, other):
        each.result()
