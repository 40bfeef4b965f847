"""The decoder of the first of several ranks: it has the others run the same passes.

A pass is a step on its way through the layers. The first rank alone schedules and chooses tokens;
the others get each step as data and run it over their own shards, states and pages.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Protocol, TypeVar

from torch import Tensor

from lowbit.formats.architectures import Config
from lowbit.formats.errors import LowbitError
from lowbit.runtime.backends.cpu_parallel import RankLinear
from lowbit.runtime.backends.ops import Ops
from lowbit.runtime.models.architectures import Model
from lowbit.runtime.models.layer_parts import last_of
from lowbit.runtime.state.changes import StateChange, make_change
from lowbit.runtime.state.device_state import DeviceState
from lowbit.runtime.state.snapshots import Snapshots
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.table import Table

if TYPE_CHECKING:
    from lowbit.runtime.models.qwen3_5_mtp import MtpHead

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunPass:
    """Run a step through all layers."""

    ids: Tensor  # [M]
    step: Step  # without block tables, which a CPU does not read


@dataclass(frozen=True, slots=True)
class OpenPass:
    """Prepare a step whose layers are run one by one."""

    number: int  # of the pass
    ids: Tensor  # [M]
    step: Step  # as in `RunPass`


@dataclass(frozen=True, slots=True)
class RunLayer:
    """Run the next layer of a pass."""

    number: int


@dataclass(frozen=True, slots=True)
class DropPass:
    """Forget a pass, which may have layers left."""

    number: int


@dataclass(frozen=True, slots=True)
class RunHead:
    """Run final norm and head for hidden states."""

    hidden: Tensor  # [M, h]


Task = RunPass | OpenPass | RunLayer | DropPass | RunHead | StateChange


class Crew(Protocol):
    """The other ranks of a model, as the first one sees them."""

    def run(self, task: object, work: Callable[[], T]) -> T:
        """Have the others run a task, and do this rank's part of it meanwhile.

        The part runs to its end, whatever happens to the caller: ranks must not part in a layer.

        Raises:
            LowbitError: a rank has failed; no task runs any more.
        """


@dataclass(frozen=True, slots=True)
class SharedDecoder:
    """A rank's model as the decoder of a runner; see `Dense` for the methods."""

    model: Model[RankLinear]
    crew: Crew
    _numbers: Iterator[int] = field(default_factory=count)  # of passes

    @property
    def config(self) -> Config:
        """Sizes of the rank's model."""
        return self.model.config

    @property
    def embedding(self) -> Table:
        """[V, h], which every rank has."""
        return self.model.embedding

    @property
    def layers(self) -> Sequence[object]:
        """Layers of the rank's model."""
        return self.model.layers

    @property
    def norm(self) -> Tensor:
        """[h], gain of the final norm."""
        return self.model.norm

    @property
    def head(self) -> RankLinear:
        """Rows of the head that the rank has."""
        return self.model.head

    @property
    def ops(self) -> Ops[RankLinear]:
        """Ops of the rank; none that exchanges is called but by the model."""
        return self.model.ops

    @property
    def mtp(self) -> "MtpHead[RankLinear] | None":
        """Head for multi-token prediction, which the first rank has whole."""
        return self.model.mtp

    def hidden(self, ids: Tensor, state: DeviceState, step: Step) -> Tensor:
        """Output of the last layer on every rank; see `Dense.hidden`."""
        return last_of(self.each_layer(ids, state, step))

    def each_layer(self, ids: Tensor, state: DeviceState, step: Step) -> Iterator[Tensor]:
        """Run M tokens through the layers of every rank; see `Dense.each_layer`.

        Yields:
            Output of each layer; other steps may interrupt that of a prompt between two.
        """
        layers, sent = self.model.each_layer(ids, state, step), portable(step)
        if not step.prompt:
            yield from self.crew.run(RunPass(ids, sent), partial(list, layers))
            return
        number = next(self._numbers)
        self.crew.run(OpenPass(number, ids, sent), _nothing)
        try:
            for _ in self.layers:
                yield self.crew.run(RunLayer(number), partial(next, layers))
        finally:
            with suppress(LowbitError):  # whoever runs the next pass hears of it
                self.crew.run(DropPass(number), _nothing)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head of every rank: [M, h] to [M, V] float32."""
        return self.crew.run(RunHead(hidden), partial(self.model.logits, hidden))


@dataclass(frozen=True, slots=True)
class FollowedDecoder:
    """A rank's model that runs the tasks of the first rank."""

    model: Model[RankLinear]
    state: DeviceState
    snapshots: Snapshots
    _passes: dict[int, Iterator[Tensor]] = field(default_factory=dict)  # that are open, by number

    def run(self, task: Task) -> None:
        """Do this rank's part of a task."""
        match task:
            case RunPass(ids, step):
                last_of(self.model.each_layer(ids, self.state, step))
            case OpenPass(number, ids, step):
                self._passes[number] = self.model.each_layer(ids, self.state, step)
            case RunLayer(number):
                next(self._passes[number])
            case DropPass(number):
                del self._passes[number]
            case RunHead(hidden):
                self.model.logits(hidden)
            case _:
                make_change(task, self.state, self.snapshots)


def portable(step: Step) -> Step:
    """The step without block tables: on a CPU its spans have the pages."""
    return replace(step, tables=step.tables[:0])


def _nothing() -> None:
    return None
