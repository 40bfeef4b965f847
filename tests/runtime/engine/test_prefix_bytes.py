"""What a hit takes over has the bytes that a fresh run of the same prompt computes."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.runtime.backends import cpu
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.request import Request
from lowbit.runtime.state.device_state import CacheSize
from tests.lanes import in_commands
from tests.short_models import SHORT_VOCABULARY, Shorten

END = 1021  # of a message
CONTEXT = 1400
ROOMY = CacheSize(context=CONTEXT, sequences=2, pages=100, snapshots=64)
TIGHT = CacheSize(context=CONTEXT, sequences=1, pages=30, snapshots=2)
FEW = CacheSize(context=CONTEXT, sequences=1, pages=30, snapshots=3)
DRAW = random.Random(3)


def message(tokens: int) -> list[int]:
    return [*(DRAW.randrange(1000) for _ in range(tokens - 1)), END]


SYSTEM, FIRST, SECOND = message(90), message(70), message(130)
LONG = message(300)  # longer than a chunk of 256
LONGER = message(270)  # as long as one may be that ends with a message
CASES = [("tiny-qwen3", torch.float32, "bf16"), ("tiny-qwen3.5", torch.bfloat16, "int8")]
EXPERTS = ("tiny-qwen3.5-moe", torch.bfloat16, "bf16")  # which keep nothing: one test has them


def id_of(case: tuple[object, ...]) -> str:
    return "-".join(map(str, case))


@pytest.fixture(scope="module", params=CASES, ids=id_of)
def model(request: pytest.FixtureRequest, shorten: Shorten) -> lowbit.Model:
    name, dtype, kv_cache = request.param
    return lowbit.load(shorten(name), device="cpu", dtype=dtype, context=CONTEXT, kv_cache=kv_cache)


def new_engine(model: lowbit.Model, size: CacheSize = ROOMY) -> Engine:
    decoder, cache_type = model.engine.decoder, model.kv_cache.cache_type
    return Engine(
        new_runner(decoder, SHORT_VOCABULARY, size, model.dtype, "cpu", cache_type=cache_type)
    )


class Watch:
    """Runs prompts and notes the bytes that they leave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[Tensor] = []
        choose = cpu.choose

        def noted(found: Tensor, *rest: Any) -> None:
            self.logits.append(found.clone())
            choose(found, *rest)

        monkeypatch.setattr(cpu, "choose", noted)

    def run(
        self, engine: Engine, prompt: Sequence[int], count: int = 3
    ) -> tuple[int, list[Tensor]]:
        """How much was reused; pages, states and logits at the last of the new tokens."""
        self.logits.clear()
        request = Request(tuple(prompt), max_new_tokens=count, message_ends=frozenset({END}))
        handle = engine.submit(request)
        sequence, state = handle._sequence, engine.runner.state
        tokens = handle.result()
        pages = torch.tensor(sequence.pages)
        left = [torch.cat(self.logits), torch.tensor(tokens)]
        for store in state.pages.stores:  # free, but nobody has written there since
            left.append(store[:, pages].flatten(1, 2)[:, : sequence.length].clone())
        if state.recurrent:
            slots = state.slots
            left += [slots.conv[:, sequence.row].clone(), slots.memory[:, sequence.row].clone()]
        return handle.reused, left


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)


@in_commands("tiny-qwen3.5-torch.bfloat16-int8", "tiny-qwen3-*")
@pytest.mark.parametrize("model", [*CASES, EXPERTS], ids=id_of, indirect=True)
def test_prompts_with_any_common_prefix(model: lowbit.Model, watch: Watch) -> None:
    engine, fresh = new_engine(model), new_engine(model)
    whole = [*SYSTEM, *FIRST, *SECOND, 5, 6, 7]
    lengths = [64, 89, 90, 91, 161, 289, 290]
    hits = set()
    watch.run(engine, whole)
    for shared in DRAW.sample(lengths, len(lengths)):
        prompt = [*whole[:shared], *([9, *FIRST, 8] if shared % 2 else [9])]
        reused, found = watch.run(engine, prompt)
        fresh.forget()
        assert_same(found, watch.run(fresh, prompt)[1])
        assert reused == max(at for at in (0, 90, 160, 290) if at <= shared)
        hits.add(reused)
    assert hits == {0, 90, 160, 290}


def test_a_prompt_again_and_a_prompt_that_is_the_beginning_of_another(
    model: lowbit.Model, watch: Watch
) -> None:
    engine = new_engine(model)
    prompts = [[*SYSTEM, *FIRST, 1, 2], SYSTEM, [*SYSTEM, *FIRST], [*SYSTEM, *FIRST, 1, 2, 3, 4]]
    first = [watch.run(new_engine(model), prompt)[1] for prompt in prompts]
    for number in (0, 0, 1, 2, 3, 1):
        _, found = watch.run(engine, prompts[number])
        assert_same(found, first[number])
    assert watch.run(engine, prompts[3])[0] == 160


@in_commands("tiny-qwen3-*")
def test_logits_between_do_not_move_the_cuts(model: lowbit.Model, watch: Watch) -> None:
    engine = new_engine(model)
    prompt = [*SYSTEM, *FIRST, 1, 2]
    _, expected = watch.run(new_engine(model), prompt)
    for start in (0, 100, 161):
        engine.logits(prompt, start)
        assert_same(watch.run(engine, prompt)[1], expected)
        engine.logits([*prompt, 7, 8], start)
        assert_same(watch.run(engine, prompt)[1], expected)


def test_chunks_longer_than_a_message_allows(
    model: lowbit.Model, watch: Watch, set_chunk: Callable[[int], None]
) -> None:
    set_chunk(256)
    engine = new_engine(model)
    for prompt in ([*LONG[:270], 3], [*LONG[:280], 5, *FIRST], [*LONG, *FIRST, 6]):
        reused, found = watch.run(engine, prompt, 2)
        assert reused == 0 if prompt[270] == 3 else reused in (0, 256)
        assert_same(found, watch.run(new_engine(model), prompt, 2)[1])


@in_commands("tiny-qwen3-*")
def test_chunks_that_a_message_makes_longer(
    model: lowbit.Model, watch: Watch, set_chunk: Callable[[int], None]
) -> None:
    """A prompt that is cut within a message it begins like neither finds nor leaves its bytes."""
    set_chunk(256)
    engine, whole = new_engine(model), [*LONGER, 5, 6]
    cut, turn = [*LONGER[:265], 3, 4], [*LONGER, 5, 6, *FIRST, 7]
    for prompt, hits in ((whole, {0}), (cut, {0}), (whole, {270}), (turn, {270}), (cut, {0, 256})):
        reused, found = watch.run(engine, prompt, 2)
        assert reused in hits
        assert_same(found, watch.run(new_engine(model), prompt, 2)[1])


@in_commands("tiny-qwen3-*")
def test_after_eviction(model: lowbit.Model, watch: Watch) -> None:
    engine = new_engine(model, TIGHT)
    prompts = [[*SYSTEM, *message(600), n] for n in range(3)]
    expected = [watch.run(new_engine(model), prompt, 2)[1] for prompt in prompts]
    for number in (0, 1, 0, 2, 2, 1, 0):
        assert_same(watch.run(engine, prompts[number], 2)[1], expected[number])


def test_a_prompt_that_has_all_snapshots_gives_up_its_first(
    model: lowbit.Model, watch: Watch
) -> None:
    whole = [*SYSTEM, *FIRST, *SECOND, *FIRST]
    for shared in (360, 290):
        engine = new_engine(model, FEW)
        watch.run(engine, [*whole, 5, 6, 7])
        prompt = [*whole[:shared], 8, 9]
        reused, found = watch.run(engine, prompt)
        assert reused == shared
        assert_same(found, watch.run(new_engine(model), prompt)[1])


@in_commands("tiny-qwen3-*")
def test_conversations_in_turn_are_as_if_each_were_alone(model: lowbit.Model, watch: Watch) -> None:
    openings = ([*SYSTEM, *FIRST], FIRST, [*SYSTEM, *SECOND])
    questions = [message(20), message(80), message(5)]

    def talk(engine: Engine, opening: list[int]) -> Any:
        """A turn at each `next`; it goes on with what the model has said."""
        ids = opening
        for question in questions:
            ids = [*ids, *question, 3]
            reused, found = watch.run(engine, ids, 3)
            ids = [*ids, *found[1].tolist()]
            yield reused, found

    alone = [list(talk(new_engine(model), opening)) for opening in openings]
    engine = new_engine(model)
    together = [talk(engine, opening) for opening in openings]
    for turn in range(len(questions)):
        for mine, other in zip(alone, together, strict=True):
            reused, found = next(other)
            assert_same(found, mine[turn][1])
            assert reused >= mine[turn][0]
            assert reused > 0 or turn == 0
