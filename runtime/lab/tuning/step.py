"""Decode steps of a short model, and their time on the GPU of this process.

A step is timed as a CUDA graph that follows itself, as steps of an answer do. A process that has
the GPU to itself keeps one state (LOG.md, "Two states"): nothing else may use the GPU meanwhile.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.runtime.engine.graphs import side_stream
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.kernels.launch.linear import Tuned
from lowbit.runtime.kernels.launch.tuned import Size
from lowbit.runtime.lab.tuning.short_model import CONTEXT, POSITION, with_launches
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.step import Step, StepPlan

BURST = 6  # steps in a row
RUNS = 7  # of which the median counts, after one more

Launches = Mapping[Size, Tuned]


@dataclass(frozen=True, slots=True)
class ShortSteps:
    """Steps of a short model that take one token of each of some sequences."""

    runner: Runner  # of the model
    step: Step  # inputs of the layers

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.step.positions.shape[0]

    def send(self, launches: Launches) -> None:
        """Send a step, kernel by kernel."""
        self._whole(with_launches(self.runner.decoder, launches))

    def step_us(self, launches: Launches) -> float:
        """Microseconds of a step, with the choice of tokens."""
        decoder = with_launches(self.runner.decoder, launches)
        return self._timed(lambda: self._whole(decoder))

    def layers_us(self, launches: Launches) -> float:
        """Microseconds of a step's layers alone, with the embedding."""
        decoder = with_launches(self.runner.decoder, launches)
        return self._timed(lambda: self._hidden(decoder))

    def _hidden(self, decoder: Decoder) -> Tensor:
        ids = self.runner.inputs.chosen[: self.tokens]
        return decoder.hidden(ids, self.runner.state, self.step)

    def _whole(self, decoder: Decoder) -> None:
        logits = decoder.logits(self._hidden(decoder))
        ids = self.runner.inputs.chosen[: self.tokens]
        self.runner.choose_tokens(logits, self.step.rows, self.step.positions, ids)

    def _timed(self, body: Callable[[], object]) -> float:
        with side_stream():
            body()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        times = [self._burst_us(graph) for _ in range(1 + RUNS)]
        return statistics.median(times[1:])

    def _burst_us(self, graph: torch.cuda.CUDAGraph) -> float:
        self.step.positions.fill_(POSITION)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(BURST):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / BURST


def short_steps(runner: Runner, tokens: int) -> ShortSteps:
    """Steps of so many tokens.

    Args:
        runner: of `new_short_runner`, with room for as many sequences.
        tokens: a power of two.
    """
    step = runner.inputs.step
    step.starts.copy_(torch.arange(len(step.starts)))
    return ShortSteps(runner, step.step(StepPlan(tokens, tokens, CONTEXT, 1), runner.tables))
