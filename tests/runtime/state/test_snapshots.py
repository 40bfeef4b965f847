"""Snapshots come back as they were, whatever order a GPU runs its streams in."""

import random
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowbit.formats.architectures.config import LinearLayers
from lowbit.runtime.state.delta import DeltaSlots, new_slots
from lowbit.runtime.state.snapshots import LEAST_PIECE, Snapshots, piece_sizes

LAYERS = LinearLayers(3, 2, 6, 8, 8, 4)
ROWS = 3
COUNT = 5


@pytest.fixture
def slots() -> DeltaSlots:
    return new_slots(LAYERS, ROWS, torch.bfloat16, "cpu")


def fill(slots: DeltaSlots, slot: int, value: int) -> None:
    """As a step does that leaves a state; numbers up to 256 are exact."""
    slots.memory[:, slot].fill_(value)
    slots.conv[:, slot].fill_(-value)


def values(slots: DeltaSlots, slot: int) -> set[float]:
    both = torch.cat((slots.memory[:, slot].flatten(), slots.conv[:, slot].float().flatten()))
    return {*torch.unique(both).tolist()}


def test_a_slot_is_copied_whole_and_no_other_changes(slots: DeltaSlots) -> None:
    for slot in range(ROWS):
        fill(slots, slot, slot + 1)
    slots.copy(2, 0)
    assert [values(slots, slot) for slot in range(ROWS)] == [
        {-3.0, 3.0}, *({-slot - 1.0, slot + 1.0} for slot in range(1, ROWS))
    ]  # fmt: skip


def test_a_snapshot_is_a_copy_of_its_slot_alone(slots: DeltaSlots) -> None:
    slots.memory.normal_()
    slots.conv.normal_()
    before = slots.memory.clone(), slots.conv.clone()
    snapshots = Snapshots(slots, COUNT, staged=False)
    assert (snapshots.staged_bytes, snapshots.most_bytes) == (0, COUNT * slots.slot_bytes)
    for slot in range(ROWS):
        snapshots.save(slot, ROWS - slot)
    slots.memory.zero_()
    slots.conv.zero_()
    for slot in (1, 0):
        snapshots.restore(ROWS - slot, slot)
    for now, then in zip((slots.memory, slots.conv), before, strict=True):
        assert torch.equal(now[:, :2], then[:, :2])
        assert not now[:, 2].any()


def taken_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the memory that snapshots allocate from now on."""
    taken: list[int] = []
    new = Snapshots._new_memory

    def noted(snapshots: Snapshots, size: int) -> Tensor:
        taken.append(size)
        return new(snapshots, size)

    monkeypatch.setattr(Snapshots, "_new_memory", noted)
    return taken


def test_memory_is_taken_once_and_where_it_is_needed(
    slots: DeltaSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = taken_sizes(monkeypatch)
    snapshots = Snapshots(slots, 10**9, staged=False)
    assert not snapshots.lacks_memory
    for number in (3, 3, 999_999_999, 3):
        snapshots.save(1, number)
    assert taken == [slots.slot_bytes] * 2


def test_a_model_without_linear_layers_has_none() -> None:
    snapshots = Snapshots(new_slots(None, 4, torch.bfloat16, "cpu"), 9, staged=True)
    assert (snapshots.count, snapshots.staged_bytes, snapshots.most_bytes) == (0, 0, 0)
    assert not snapshots.lacks_memory


@pytest.mark.parametrize("size", [1, LEAST_PIECE - 1, LEAST_PIECE, 51_511_296, 154_000_000])
def test_pieces_waste_little_page_locked_memory(size: int) -> None:
    pieces = piece_sizes(size)
    rounded = sum(1 << (piece - 1).bit_length() for piece in pieces)
    assert sum(pieces) == size
    assert rounded - size < LEAST_PIECE
    assert piece_sizes(0) == []


class Device(TorchFunctionMode):
    """Stands in for a GPU: what is written to tensors waits in its stream until `finish`.

    Then an operation of any stream may be the next whose stream does not wait for an event.
    """

    def __init__(self, patch: pytest.MonkeyPatch, draw: random.Random) -> None:
        super().__init__()
        self.draw, self.here, self.running = draw, Stream(), False
        self.streams = [self.here]
        patch.setattr(torch.cuda, "Stream", self.new_stream)
        patch.setattr(torch.cuda, "Event", lambda: Event(self))
        patch.setattr(torch.cuda, "stream", self.on)
        empty = torch.empty
        patch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **o: empty(*sizes, **o))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.running or func not in (Tensor.copy_, Tensor.fill_):
            return func(*args, **kwargs or {})
        self.here.todo.append(lambda: func(*args) is not None)
        return args[0]

    def new_stream(self) -> "Stream":
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def on(self, stream: "Stream") -> Any:
        before, self.here = self.here, stream
        yield
        self.here = before

    def finish(self, favourite: int | None) -> None:
        """Run all streams; the favourite one whenever it can."""
        self.running = True
        while any(stream.todo for stream in self.streams):
            order = self.draw.sample(self.streams, len(self.streams))
            if favourite is not None and favourite < len(self.streams):
                order.insert(0, self.streams[favourite])
            assert any(stream.run_next() for stream in order), "streams wait for each other"
        self.running = False


class Stream:
    def __init__(self) -> None:
        self.todo: deque[Callable[[], bool]] = deque()

    def run_next(self) -> bool:
        """False if there is nothing to run, or if it waits."""
        if not self.todo or not self.todo[0]():
            return False
        self.todo.popleft()
        return True


class Event:
    """Waiting is for the last `record` before, as with CUDA."""

    def __init__(self, device: Device) -> None:
        self.device, self.records, self.passed = device, 0, 0

    def record(self) -> None:
        self.records += 1

        def passes() -> bool:
            self.passed += 1
            return True

        self.device.here.todo.append(passes)

    def wait(self) -> None:
        awaited = self.records
        self.device.here.todo.append(lambda: self.passed >= awaited)


@pytest.mark.parametrize("favourite", [0, 1, None], ids=["steps", "copies", "any"])
@pytest.mark.parametrize("seed", range(5))
def test_streams_may_run_in_any_order_that_events_allow(
    slots: DeltaSlots, monkeypatch: pytest.MonkeyPatch, seed: int, favourite: int | None
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr("lowbit.runtime.state.snapshots.LEAST_PIECE", 1 << 10)
    device = Device(monkeypatch, draw)
    snapshots = Snapshots(slots, COUNT, staged=True)
    assert len(snapshots._sizes) > 2
    now, saved = dict.fromkeys(range(ROWS), 0), dict[int, int]()
    with device:
        for value in range(1, 100):
            slot, number = draw.randrange(ROWS), draw.randrange(COUNT)
            fill(slots, slot, value)
            now[slot] = value
            if number in saved and draw.random() < 0.4:
                snapshots.restore(number, slot)
                now[slot] = saved[number]
            if draw.random() < 0.7:
                number = draw.randrange(COUNT)
                snapshots.save(slot, number)
                saved[number] = now[slot]
        device.finish(favourite)
        assert {slot: values(slots, slot) for slot in now} == {
            slot: {value, -value} for slot, value in now.items()
        }
        for number, value in saved.items():
            snapshots.restore(number, 0)
            device.finish(favourite)
            assert values(slots, 0) == {value, -value}


@pytest.fixture
def staged(slots: DeltaSlots, monkeypatch: pytest.MonkeyPatch) -> Snapshots:
    """Snapshots of several pieces each, of which two may be ready."""
    module = "lowbit.runtime.state.snapshots"
    monkeypatch.setattr(f"{module}.LEAST_PIECE", 1 << 10)
    monkeypatch.setattr(f"{module}.MOST_PIECE", 1 << 11)
    monkeypatch.setattr(f"{module}.READY_BYTES", 2 * slots.slot_bytes)
    Device(monkeypatch, random.Random(0))
    found = Snapshots(slots, COUNT, staged=True)
    assert len(found._sizes) > 2
    return found


def test_a_snapshot_takes_the_memory_that_is_ready(
    slots: DeltaSlots, staged: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = taken_sizes(monkeypatch)
    while staged.lacks_memory:
        staged.prepare()
    assert taken == staged._sizes * 2
    for number in range(2):
        fill(slots, number, number + 1)
        staged.save(number, number)
    assert len(taken) == 2 * len(staged._sizes)
    staged.prepare()
    staged.save(0, 2)  # whose memory has one piece
    assert taken == staged._sizes * 3
    staged.save(1, 3)
    assert taken == staged._sizes * 4
    for number, value in enumerate((1, 2, 1, 2)):
        staged.restore(number, 2)
        assert values(slots, 2) == {value, -value}


def test_no_more_memory_is_ready_than_all_snapshots_take(
    staged: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowbit.runtime.state.snapshots.READY_BYTES", 1 << 40)
    taken = taken_sizes(monkeypatch)
    staged.save(0, 4)
    while staged.lacks_memory:
        staged.prepare()
    for number in range(COUNT):
        staged.save(0, number)
    assert taken == staged._sizes * COUNT
    assert not staged.lacks_memory


def test_memory_that_is_refused_ahead_is_asked_for_when_it_is_needed(
    slots: DeltaSlots,
    staged: Snapshots,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error would end all ranks of a model, and the server with them."""
    new, refused = Snapshots._new_memory, [False]

    def full(snapshots: Snapshots, size: int) -> Tensor:
        if refused[0]:
            raise RuntimeError("CUDA error: out of memory\nmore words")
        return new(snapshots, size)

    monkeypatch.setattr(Snapshots, "_new_memory", full)
    staged.prepare()
    refused[0] = True
    assert staged.lacks_memory
    for _ in range(2):  # another rank may have more
        staged.prepare()
    assert not staged.lacks_memory
    assert caplog.messages == [
        "memory for later snapshots is not locked ahead: CUDA error: out of memory"
    ]
    fill(slots, 1, 7)
    with pytest.raises(RuntimeError, match="out of memory"):
        staged.save(1, 3)
    refused[0] = False
    staged.save(1, 3)
    staged.restore(3, 2)
    assert values(slots, 2) == {7, -7}


@pytest.mark.gpu
def test_a_gpu_brings_back_what_many_steps_have_left() -> None:
    """States as large as those of a 4B, saved faster than the bus takes them; nothing is waited for
    but by the GPU, once memory is page-locked.
    """
    slots = new_slots(LinearLayers(24, 16, 32, 128, 128, 4), ROWS, torch.bfloat16, "cuda")
    snapshots = Snapshots(slots, COUNT, staged=True)
    assert snapshots.staged_bytes == 2 * slots.slot_bytes
    draw, now, saved = random.Random(1), dict.fromkeys(range(ROWS), 0), dict[int, int]()
    for _ in range(2 * len(snapshots._sizes) + 1):  # of two, and a piece of the third
        snapshots.prepare()
    for number in range(COUNT):
        snapshots.save(0, number)
        saved[number] = 0
    assert all(piece.is_pinned() for pieces in snapshots._kept.values() for piece in pieces)
    assert not snapshots._ready
    before = torch.cuda.get_sync_debug_mode()
    found = []
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        for value in range(1, 200):
            slot, number = draw.randrange(ROWS), draw.randrange(COUNT)
            if draw.random() < 0.4:
                snapshots.restore(number, slot)
                now[slot] = saved[number]
            else:
                fill(slots, slot, value)
                now[slot] = value
            number = draw.randrange(COUNT)
            snapshots.save(slot, number)
            saved[number] = now[slot]
            fill(slots, slot, value)  # at once, while the copy is on its way
            now[slot] = value
            for each, expected in now.items():
                found.append((slots.memory[:, each] == expected).all())
                found.append((slots.conv[:, each] == -expected).all())
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert bool(torch.stack(found).all())
    for number, value in saved.items():
        snapshots.restore(number, 1)
        assert values(slots, 1) == {value, -value}
