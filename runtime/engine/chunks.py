"""Chunks of prompts on Hopper: padded to few widths, and replayed as CUDA graphs.

The host takes longer for the some hundred launches of a short chunk than the GPU for their work. So
a chunk's tokens, positions, sequence and slots lie in tensors that never move, from which kernels
read even how many tokens there are, and the launches of a width can be recorded once.

Bits: a chunk is padded whether it is launched or replayed, so both ways are the same kernels over
the same shapes, those of cuBLAS included, whose sums may depend on the number of rows. A chunk's
own kernels sum each token's numbers in an order that padding does not change; nothing of a padded
token is stored in pages, states or windows. No width lies beyond a threshold (`thresholds`) from
the lengths that it stands for, so a padded chunk takes the ways that its own length takes.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.models.layer_parts import last_of
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.page_counts import PAGE, SCRATCH
from lowbit.runtime.state.step import Span, Step, StepPlan
from lowbit.runtime.state.step_buffers import StepBuffers, new_step_buffers
from lowbit.runtime.thresholds import SEQUENCE_TOKENS

CHUNK_WIDTHS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)  # tokens
RunLayers = Callable[[Tensor, Step], Iterable[Tensor]]  # of ids and a step: output of each layer
LAUNCHED = 1  # prompts with such a chunk before one is recorded, which takes two launches' time


@dataclass(slots=True)
class Chunks:
    """Runs chunks of prompts, one at a time."""

    decoder: Decoder  # the model
    layers: RunLayers  # of the model, on its sequences' state; `Runner.each_layer`
    tables: Tensor  # [R, T / PAGE] int32 block tables by row
    # Recorded chunks, by width, by whether only the last hidden state is wanted, and by whether
    # they stand behind an image
    graphs: Graphs
    buffers: StepBuffers = field(init=False)  # inputs of a chunk
    hidden: Tensor = field(init=False)  # [W, h], hidden states of the last chunk
    _prompts: int = 0  # that have begun
    # see `_is_common`
    _uses: dict[tuple[int, bool, bool], tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Allocate what the widest chunk needs."""
        table, widest = self.decoder.embedding, CHUNK_WIDTHS[-1]
        self.buffers = new_step_buffers(widest, table.device)
        shape = widest, table.shape[1]
        self.hidden = torch.zeros(shape, dtype=table.dtype, device=table.device)

    def takes(self, tokens: int) -> bool:
        """True if a chunk of so many tokens is padded; others are launched as they are."""
        return SEQUENCE_TOKENS < tokens <= CHUNK_WIDTHS[-1]

    def run(self, plan: StepPlan, ids: Numbers[int], shifts: Tensor, begins: bool) -> Tensor:
        """Run the next tokens of a prompt through the layers; see `takes` and `Runner.chunk`.

        Args:
            plan: of the chunk without padding. One with a part of an image is never replayed: its
                embeddings and angles do not lie where those of the last one did.
            ids: its tokens.
            shifts: see `step_of`.
            begins: the chunk is the first of its prompt.

        Returns:
            [len(ids), h] hidden states, or [1, h], until the next chunk runs.
        """
        M, last = width_of(plan.tokens), plan.ending == "last"
        self.buffers.write(plan.spans, ids, M)
        self._prompts += begins
        kind, own = (M, last, plan.shifted), shifts if plan.shifted else None
        if plan.axes is not None:
            self.forward(M, last, None, plan)
        elif self._is_common(kind):
            self.graphs.replay(kind, lambda: self.forward(M, last, own))
        else:
            self.forward(M, last, own)
        return self.hidden[: 1 if last else plan.tokens]

    def forward(
        self,
        M: int,
        last: bool = False,
        shifts: Tensor | None = None,
        images: StepPlan | None = None,
    ) -> None:
        """Run the tokens in `buffers`, all that is known of them on the host being their width.

        Args:
            M: their number with padding.
            last: only the last token's hidden state is wanted.
            shifts: of text behind an image, see `step_of`.
            images: plan without padding of a chunk with a part of an image.
        """
        axes = None if images is None else images.axes
        plan = StepPlan(
            tokens=M,
            sequences=1,
            max_kv_len=self.tables.shape[1] * PAGE,
            longest=M,
            spans=(Span(SCRATCH, 0, M),),
            prompt=True,
            ending="last" if last else "apart",
            embedded=() if images is None else images.embedded,
            axes=None if axes is None else pad(axes, (0, M - axes.shape[1])),
            shifted=shifts is not None,
        )
        ids, step = self.buffers.ids[:M], self.buffers.step(plan, self.tables, shifts)
        hidden = last_of(self.layers(ids, step))
        self.hidden[: len(hidden)] = hidden

    def _is_common(self, kind: tuple[int, bool, bool]) -> bool:
        """True if more than LAUNCHED prompts have had such a chunk: a lone prompt gains nothing."""
        count, last = self._uses.get(kind, (0, 0))
        if last != self._prompts or not count:
            count += 1
            self._uses[kind] = count, self._prompts
        return count > LAUNCHED


def new_chunks(
    decoder: Decoder, layers: RunLayers, tables: Tensor, beside: Graphs
) -> Chunks | None:
    """Chunks that may be replayed; None where they are launched as they are.

    That is everywhere but on Hopper, where PyTorch's attention takes what the host knows of a
    sequence, and with experts, since padding would choose some of them too.
    """
    if not tables.is_cuda or torch.cuda.get_device_capability(tables.device)[0] != 9:
        return None
    if decoder.config.experts is not None:
        return None
    return Chunks(decoder, layers, tables, Graphs(beside=beside, most=2 * len(CHUNK_WIDTHS)))


def width_of(tokens: int) -> int:
    """Tokens that a chunk of so many, at most the last of CHUNK_WIDTHS, is padded to."""
    return next(width for width in CHUNK_WIDTHS if width >= tokens)
