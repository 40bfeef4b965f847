"""An engine with little room, all of which must come back."""

import torch

import lowbit.runtime as lowbit
from lowbit.runtime.engine.draft.ngram import NewDrafter
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.state.device_state import CacheSize
from tests.runtime.engine.draft.guesses import drafting_by

CONTEXT = 200
SMALL = CacheSize(context=CONTEXT, sequences=3, pages=9, snapshots=4, drafts=5)
INTERRUPTED = "a step was interrupted while this request ran"


def new_engine(
    model: lowbit.Model, size: CacheSize = SMALL, drafter: NewDrafter | None = None
) -> Engine:
    runner = new_runner(model.engine.decoder, 261, size, torch.float32, "cpu")
    drafting = None if drafter is None else drafting_by(drafter, runner, size.drafts)
    return Engine(runner, drafting=drafting)


def assert_all_free(engine: Engine) -> None:
    """Every page, row and snapshot is free once nobody asks and nothing is kept."""
    while engine.step():
        pass
    engine.forget()
    room = engine.scheduler.blocks
    pools = (room.pages, room.rows, room.snapshots)
    for pool, first in zip(pools, (1, 1, 0), strict=True):
        assert not any(pool._owners)
        assert sorted(pool._free) == list(range(first, len(pool._owners)))
    assert not engine.scheduler.decoding
    assert not engine.scheduler.waiting
