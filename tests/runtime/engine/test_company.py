"""A token has the same bits whatever else is in its step: other sequences, or tokens of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.page_counts import PAGE
from lowbit.runtime.backends import cpu
from lowbit.runtime.engine import sequence as engine_sequence
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.plan import OpenRow
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.models import loader
from lowbit.runtime.models.layer_parts import last_of
from lowbit.runtime.state.step import NO_SLOT, Span, Step
from lowbit.runtime.thresholds import EXACT_TOKENS, SEQUENCE_TOKENS
from tests.lanes import in_commands
from tests.short_models import Shorten

NEW = 4  # tokens until which a sequence is watched
LENGTHS = (60, 5, 70, 1, 130, 64, 16, 9, 200, 17, 3, 90, 48, 2, 33, 128)
CASES = [
    ("tiny-qwen3", torch.float32, None, "bf16"),
    ("tiny-qwen3", torch.bfloat16, "int4", "int8"),
    ("tiny-qwen3.5", torch.float32, None, "bf16"),
    ("tiny-qwen3.5-moe", torch.bfloat16, "int4", "int8"),
]
Rows = dict[int, list[Tensor]]


@pytest.fixture(scope="module", params=CASES, ids=["-".join(map(str, case)) for case in CASES])
def model(request: pytest.FixtureRequest, shorten: Shorten) -> lowbit.Model:
    name, dtype, recipe, kv_cache = request.param
    return lowbit.load(
        shorten(name),
        device="cpu",
        dtype=dtype,
        context=256,
        max_sequences=EXACT_TOKENS,
        quantize=recipe,
        kv_cache=kv_cache,
    )


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Logits that tokens were chosen by, by row."""
    choose, seen = cpu.choose, Rows()

    def noted(found: Tensor, sampler: Any, rows: Tensor, *rest: Any) -> None:
        for m, row in enumerate(rows.tolist()):
            seen.setdefault(row, []).append(found[m].clone())
        choose(found, sampler, rows, *rest)

    monkeypatch.setattr(cpu, "choose", noted)
    return seen


def request_of(number: int, count: int = 40) -> Request:
    """Prompts of many lengths, short ones behind these; every other one is sampled."""
    generator = torch.Generator().manual_seed(number)
    length = LENGTHS[number] if number < len(LENGTHS) else 1 + number % 9
    ids = torch.randint(1000, (length,), generator=generator).tolist()
    hot = lowbit.SamplingParams(0.9, top_k=40, seed=number)
    return Request(tuple(ids), hot if number % 2 else lowbit.SamplingParams(), count)


@dataclass
class Left:
    """All that a sequence has left on the device, and its logits."""

    tokens: list[int]
    tensors: list[Tensor] = field(repr=False)

    def assert_equals(self, other: "Left") -> None:
        assert self.tokens == other.tokens
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            assert torch.equal(mine, theirs)


def left_by(
    engine: Engine,
    logits: Rows,
    watched: int,
    others: Sequence[int] = (),
    turned: bool = False,
    guests: Callable[[int], list[Request]] = lambda step: [],
) -> Left:
    """Run a request among others until it has NEW tokens.

    Args:
        engine: nothing of it is in use.
        logits: by row.
        watched: number of the request.
        others: numbers of the others.
        turned: submit them in the opposite order.
        guests: further requests that come before a step.
    """
    engine.forget()
    logits.clear()
    order = [*others[::2], watched, *others[1::2]]
    handles = {n: engine.submit(request_of(n)) for n in (order[::-1] if turned else order)}
    sequence, step, visitors = handles[watched]._sequence, 0, []
    while len(sequence.output) < NEW:
        visitors += [engine.submit(request) for request in guests(step)]
        engine.step()
        step += 1
    state = engine.runner.state
    pages = torch.tensor(sequence.pages)
    written = sequence.length
    tensors = [torch.stack(logits[sequence.row])[:NEW]]
    for store in state.pages.stores:
        tensors.append(store[:, pages].flatten(1, 2)[:, :written].clone())
    if state.recurrent:
        tensors += [
            store[:, sequence.row].clone() for store in (state.slots.conv, state.slots.memory)
        ]
    found = Left(list(sequence.output), tensors)
    for handle in (*handles.values(), *visitors):
        handle.cancel()
    engine.step()
    return found


@in_commands(
    "tiny-qwen3-torch.bfloat16-int4-int8-0-*",
    "tiny-qwen3.5-torch.float32-None-bf16-0-*",
    "tiny-qwen3.5-moe-*",
    "tiny-qwen3-torch.float32-None-bf16-7-*",
)
@pytest.mark.parametrize(("watched", "counts"), [(0, (1, 63)), (7, (16, 7))])
def test_a_sequence_leaves_the_same_bits_in_any_company(
    model: lowbit.Model, logits: Rows, watched: int, counts: tuple[int, ...]
) -> None:
    alone = left_by(model.engine, logits, watched)
    # Those in FP32 run the same operations.
    most = EXACT_TOKENS if model.dtype == torch.bfloat16 or "moe" in model.folder.name else 24
    everybody = [number for number in range(most) if number != watched]
    for count, turned in zip(counts, (False, True), strict=True):
        others = everybody[-count:] if turned else everybody[:count]
        left_by(model.engine, logits, watched, others, turned).assert_equals(alone)


def test_others_may_join_and_leave_midway(model: lowbit.Model, logits: Rows) -> None:
    alone = left_by(model.engine, logits, 0)

    def guests(step: int) -> list[Request]:
        return [request_of(1 + step % 15, 1 + step % 4)] * (step % 3)

    left_by(model.engine, logits, 0, (3, 4), guests=guests).assert_equals(alone)


def opened(runner: Runner, row: int, ids: Sequence[int]) -> engine_sequence.Sequence:
    """A sequence with pages of its own, of which no token has been run."""
    made = engine_sequence.Sequence(Request(tuple(ids)), count=1, seed=0)
    made.row, made.pages = row, list(range(2 + 4 * row, 4 * row, -1))
    assert made.page_count <= len(made.pages)
    runner.apply([OpenRow(made, None, None)])
    return made


def rows_of(runner: Runner, made: engine_sequence.Sequence) -> list[Tensor]:
    state = runner.state
    stores = [store[:, made.pages] for store in state.pages.stores]
    if state.recurrent:
        stores += [state.slots.conv[:, made.row], state.slots.memory[:, made.row]]
    return [store.clone() for store in stores]


def clean(runner: Runner) -> None:
    for store in runner.state.pages.stores:
        store.zero_()


IDS = torch.randint(1000, (60,), generator=torch.Generator().manual_seed(9)).tolist()
START = 28  # tokens of a prompt, run together


def run_in_steps(runner: Runner, size: int) -> list[Tensor]:
    """Hidden states of IDS, and what they leave, with so many tokens a step behind the prompt."""
    clean(runner)
    made = opened(runner, 1, IDS)
    hidden = []
    for first in (0, *range(START, len(IDS), size)):
        stop = min(len(IDS), START if first == 0 else first + size)
        made.chunk_ends = [stop]
        hidden.append(last_of(runner.chunk([made])))
        made.length = stop
    return [torch.cat(hidden), *rows_of(runner, made)]


@pytest.fixture(scope="module")
def one_by_one(model: lowbit.Model) -> list[Tensor]:
    return run_in_steps(model.engine.runner, 1)


@pytest.mark.parametrize("size", [2, 5, SEQUENCE_TOKENS])
def test_tokens_of_one_step_are_those_of_steps_of_one(
    model: lowbit.Model, one_by_one: list[Tensor], size: int
) -> None:
    several = run_in_steps(model.engine.runner, size)
    for one, other in zip(one_by_one, several, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("count", [SEQUENCE_TOKENS, SEQUENCE_TOKENS + 1, 60])
def test_a_last_hidden_state_is_the_same_without_the_others(
    model: lowbit.Model, count: int
) -> None:
    runner = model.engine.runner
    found = []
    for last in (False, True):
        clean(runner)
        made = opened(runner, 1, IDS)
        made.chunk_ends = [count]
        hidden = last_of(runner.chunk([made], last))
        assert len(hidden) == (1 if last and count > SEQUENCE_TOKENS else count)
        made.length = count
        found.append([hidden[-1], *rows_of(runner, made)])
    for whole, alone in zip(*found, strict=True):
        assert torch.equal(whole, alone)


def step_of(runner: Runner, parts: Sequence[tuple[engine_sequence.Sequence, int]]) -> Step:
    """A step of the next tokens of several sequences, so many of each."""
    spans: list[Span] = []
    positions: list[int] = []
    rows: list[int] = []
    write: list[int] = []
    starts = [0]
    for made, count in parts:
        slots = [*[NO_SLOT] * (count - 1), made.row]
        spans.append(Span(made.row, made.length, count, tuple(made.pages), made.row, tuple(slots)))
        positions += range(made.length, made.length + count)
        rows += [made.row] * count
        starts.append(starts[-1] + count)
        write += slots
    ints = [torch.tensor(values, dtype=torch.int32) for values in (positions, rows, starts, write)]
    read = torch.tensor([made.row for made, _ in parts], dtype=torch.int32)
    return Step(
        positions=ints[0],
        rows=ints[1],
        starts=ints[2],
        tables=runner.tables,
        read=read,
        write=ints[3],
        max_kv_len=2 * PAGE,
        longest=max(count for _, count in parts),
        spans=tuple(spans),
    )


def test_several_tokens_of_several_sequences(model: lowbit.Model) -> None:
    runner = model.engine.runner
    texts = [IDS, IDS[10:50], IDS[::-1]]
    counts = (5, 1, 3)
    alone: list[list[Tensor]] = []
    together: list[list[Tensor]] = []
    for found in (alone, together):
        clean(runner)
        made = [opened(runner, row, ids) for row, ids in enumerate(texts, start=1)]
        for each, length in zip(made, (START, 3, 40), strict=True):
            each.chunk_ends = [length]
            last_of(runner.chunk([each]))
            each.length = length
        outs: list[list[Tensor]] = [[], [], []]
        for _ in range(3):
            parts = list(zip(made, counts, strict=True))
            for group in [[part] for part in parts] if found is alone else [parts]:
                ids = [id for each, k in group for id in each.request.prompt[each.length :][:k]]
                step = step_of(runner, group)
                hidden = model.engine.decoder.hidden(torch.tensor(ids), runner.state, step)
                sizes = [k for _, k in group]
                for (each, _), part in zip(group, torch.split(hidden, sizes), strict=True):
                    outs[each.row - 1].append(part)
            for each, count in parts:
                each.length += count
        for each, out in zip(made, outs, strict=True):
            found.append([torch.cat(out), *rows_of(runner, each)])
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@in_commands("one-scale")
@pytest.mark.parametrize("rotated", [False, True], ids=["groups", "one-scale"])
def test_rounded_inputs_give_a_token_the_same_bits_in_a_prompt(
    shorten: Shorten, monkeypatch: pytest.MonkeyPatch, rotated: bool
) -> None:
    """Steps have the same bits, a prompt up to its attention, which adds in another order there."""
    monkeypatch.setattr(loader, "is_rotated", lambda manifest: rotated)
    model = lowbit.load(
        shorten("tiny-qwen3"),
        device="cpu",
        context=256,
        quantize="int4",
        activations="int8",
    )
    runner, ids = model.engine.runner, torch.tensor([*IDS, *IDS[::-1]])  # beyond EXACT_TOKENS

    def run(size: int, prompt: bool) -> tuple[Tensor, list[Tensor]]:
        clean(runner)
        made = opened(runner, 1, ids.tolist())
        hidden = []
        for part in torch.split(ids, size):
            step = replace(step_of(runner, [(made, len(part))]), prompt=prompt)
            hidden.append(model.engine.decoder.hidden(part, runner.state, step))
            made.length += len(part)
        return torch.cat(hidden), rows_of(runner, made)

    hidden, stores = run(1, prompt=False)
    for size, prompt in ((50, False), (len(ids), False), (len(ids), True)):
        several, others = run(size, prompt)
        layers = 1 if prompt else None  # whose keys and values come before any attention
        assert prompt or torch.equal(several, hidden)
        for one, other in zip(stores, others, strict=True):
            assert torch.equal(one[:layers], other[:layers])
