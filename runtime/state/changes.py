"""Changes of pages and recurrent states between two steps, as data: ranks make the same ones."""

from dataclasses import dataclass

from lowbit.runtime.state.device_state import DeviceState
from lowbit.runtime.state.snapshots import Snapshots


@dataclass(frozen=True, slots=True)
class CopyPage:
    """Copy a page of keys and values to another."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class ClearSlot:
    """Reset a slot to the state before the first token."""

    slot: int


@dataclass(frozen=True, slots=True)
class CopySlot:
    """Copy the state of a slot to another."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SaveSnapshot:
    """Snapshot the recurrent state in a slot, behind the steps under way."""

    slot: int
    number: int


@dataclass(frozen=True, slots=True)
class RestoreSnapshot:
    """Copy a snapshot to a slot."""

    number: int
    slot: int


@dataclass(frozen=True, slots=True)
class PrepareSnapshot:
    """Allocate a piece of the memory that later snapshots will need."""


StateChange = CopyPage | ClearSlot | CopySlot | SaveSnapshot | RestoreSnapshot | PrepareSnapshot


def make_change(change: StateChange, state: DeviceState, snapshots: Snapshots) -> None:
    """Change the state of the sequences, behind the steps under way."""
    match change:
        case CopyPage(source, target):
            state.pages.copy(source, target)
        case ClearSlot(slot):
            state.slots.clear(slot)
        case CopySlot(source, target):
            state.slots.copy(source, target)
        case SaveSnapshot(slot, number):
            snapshots.save(slot, number)
        case RestoreSnapshot(number, slot):
            snapshots.restore(number, slot)
        case PrepareSnapshot():
            snapshots.prepare()
