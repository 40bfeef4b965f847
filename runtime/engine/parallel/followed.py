"""The runner of a rank behind the first on a GPU: it runs the same steps and chooses nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from lowbit.runtime.engine.graphs import Graphs, side_stream
from lowbit.runtime.engine.parallel.tasks import RunChunk, RunHead, RunStep, SetPages, SetShift
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.state.changes import StateChange, make_change
from lowbit.runtime.state.step import StepPlan

GpuTask = RunStep | RunChunk | RunHead | SetPages | SetShift | StateChange
MOST_GRAPHS = 256  # more than the first rank keeps, whose graphs of steps and rounds lie apart


@dataclass(frozen=True, slots=True)
class FollowedRunner:
    """A rank's runner that runs the tasks of the first rank."""

    runner: Runner
    _graphs: Graphs = field(default_factory=partial(Graphs, most=MOST_GRAPHS))

    def run(self, task: GpuTask) -> None:
        """Do this rank's part of a task; the host does not wait for the GPU."""
        runner = self.runner
        match task:
            case RunStep(plan, fresh):
                self._run_step(partial(runner.run_unchosen, plan), plan, fresh)
            case RunChunk(plan, ids, begins):
                runner.run_chunk(plan, ids, begins)
            case RunHead(tokens):
                like = runner.decoder.embedding
                shape = tokens, like.shape[1]
                runner.run_head(torch.empty(shape, dtype=like.dtype, device=like.device))
            case SetPages(row, pages):
                runner.set_pages(row, pages)
            case SetShift(row, shift):
                runner.set_shift(row, shift)
            case _:
                make_change(task, runner.state, runner.snapshots)

    def _run_step(self, step: Callable[[], None], plan: StepPlan, fresh: bool) -> None:
        if not self.runner.on_gpu:
            step()
            return
        if fresh:
            with side_stream():
                step()
        self._graphs.replay(plan, step)
