"""Runs of a vision tower on a GPU, recorded as CUDA graphs: one for each size of image.

The host takes as long for the hundreds of launches of a run as a GPU for their work, and longer
beside other threads. A size is recorded when it comes again among the last MOST_SIZES sizes: where
more take turns, each would drop the graph of another, and recording takes longer than a launch.

Bits: a graph has the kernels of a run that is launched, over the same shapes.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.images.patches import ImagePatches
from lowbit.runtime.models.layer_parts import last_of
from lowbit.runtime.models.vision import VisionTower

MOST_SIZES = 8  # that are recorded
MOST_RECORDED = 8192  # patches of an image, a screen of 1920 x 1080: larger ones hide launches
Grid = tuple[int, int]  # rows and columns of patches


class Recorder(Protocol):
    """The part of `Graphs` that is used here."""

    def __contains__(self, key: Grid) -> bool:
        """True if a run is recorded."""

    def replay(self, key: Grid, step: Callable[[], None]) -> None:
        """Replay a run, recorded before if it is not yet."""


@dataclass(slots=True)
class TowerGraphs:
    """Runs a tower whose weights are all on its GPU."""

    tower: VisionTower
    has_room: Callable[[int], bool]  # for a recording of so many patches
    graphs: Recorder = field(default_factory=lambda: Graphs(most=MOST_SIZES))
    # The newest sizes, each of which has run
    _last: OrderedDict[Grid, None] = field(default_factory=OrderedDict)
    # Input of the first block and the merger's output, which recorded runs find in one place
    _x: Tensor | None = None
    _out: Tensor | None = None
    _angles: dict[Grid, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def pieces(self, image: ImagePatches) -> Iterator[Tensor | None]:
        """Embeddings of an image, in pieces; see `VisionTower.pieces`."""
        if not self._is_recorded(image):
            yield from self.tower.pieces(image)
            self._note(image)
            return
        self._note(image)
        x, out = self._buffers()
        x[: image.count].copy_(self.tower.embed(image))
        self.graphs.replay(image.grid, partial(self._run, image.grid, image.count, image.tokens))
        yield out[: image.tokens].clone()

    def _is_recorded(self, image: ImagePatches) -> bool:
        """True if the run of an image is recorded, or is to be."""
        if image.grid in self.graphs:
            return True
        if image.grid not in self._last or not self.has_room(image.count):
            return False
        for grid in [each for each in self._angles if each not in self.graphs]:
            del self._angles[grid]  # of a recording that has been dropped
        self._angles[image.grid] = self.tower.angles(image.grid)
        return True

    def _note(self, image: ImagePatches) -> None:
        """Make the size of an image the newest of the last ones, unless none is recorded for it."""
        if image.count > MOST_RECORDED:
            return
        self._last[image.grid] = None
        self._last.move_to_end(image.grid)
        if len(self._last) > MOST_SIZES:
            self._last.popitem(last=False)

    def _buffers(self) -> tuple[Tensor, Tensor]:
        if self._x is None or self._out is None:
            weight, config = self.tower.patches.weight, self.tower.config
            tokens = MOST_RECORDED // config.spatial_merge_size**2
            self._x = weight.new_empty(MOST_RECORDED, config.hidden_size)
            self._out = weight.new_empty(tokens, config.out_hidden_size)
        return self._x, self._out

    def _run(self, grid: Grid, patches: int, tokens: int) -> None:
        """Run the blocks and the merger from buffer to buffer."""
        x, out = self._buffers()
        blocks = self.tower.each_block(x[:patches], self._angles[grid])
        last = last_of(found for found in blocks if found is not None)
        out[:tokens].copy_(self.tower.merge(last))
