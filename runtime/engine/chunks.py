"""Chunks of prompts on a GPU: padded to few widths, and replayed as CUDA graphs.

The host takes longer for the some hundred launches of a short chunk than the GPU for their work. So
a chunk's tokens, positions, sequence and slots lie in tensors that never move, from which kernels
read even how many tokens there are, and the launches of a width can be recorded once.

A chunk of up to SEQUENCE_TOKENS, as the last words of most chats are, takes the kernels of a
decode step, and is padded as one with drafts is: on any GPU. Longer ones are padded on Hopper.
Images' embeddings and positions lie in tensors of their own (`ChunkImages`).

Bits: a chunk is padded whether it is launched or replayed, so both ways are the same kernels over
the same shapes, those of cuBLAS included, whose sums may depend on the number of rows. A chunk's
own kernels sum each token's numbers in an order that padding does not change; nothing of a padded
token is stored in pages, states or windows. No width lies beyond a threshold (`thresholds`) from
the lengths that it stands for, so a padded chunk takes the ways that its own length takes; a short
one has in any case the bits of its tokens one by one.

Chunks of several prompts (`engine.packs`) pass together as one; their recording has room for
PACK_SEQUENCES.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.formats.page_counts import PAGE, SCRATCH
from lowbit.runtime.engine.graphs import Graphs, longest_for
from lowbit.runtime.models.layer_parts import last_of
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.step import Span, Step, StepPlan
from lowbit.runtime.state.step_buffers import (
    ChunkImages,
    StepBuffers,
    new_chunk_images,
    new_step_buffers,
)
from lowbit.runtime.thresholds import PACK_SEQUENCES, SEQUENCE_TOKENS

SHORT_WIDTHS = (8, 16)  # tokens; few, since a short chunk has a graph for each length of keys
PACK_WIDTHS = (16, 32, 64)  # tokens of short chunks of several prompts
CHUNK_WIDTHS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1088, 1152)  # tokens
RunLayers = Callable[[Tensor, Step], Iterable[Tensor]]  # of ids and a step: output of each layer
# Graphs that are kept. At a context of 40,960 text has chunks of 49 kinds where longer ones are
# padded, text and pictures of 95; one that is dropped is recorded again when it comes back
MOST_SHORT, MOST_CHUNKS = 16, 96
Kind = tuple[StepPlan, bool]  # of a chunk: see `Chunks.graphs`
LAUNCHED = 1  # prompts with such a chunk before one is recorded, which takes two launches' time


@dataclass(slots=True)
class Chunks:
    """Runs chunks of prompts, one at a time."""

    decoder: Decoder  # the model
    layers: RunLayers  # of the model, on its sequences' state; `Runner.each_layer`
    tables: Tensor  # [R, T / PAGE] int32 block tables by row
    graphs: Graphs  # recorded chunks, by the plan of `padded` and whether they have images
    longer: bool  # chunks of more than SEQUENCE_TOKENS are padded, too
    buffers: StepBuffers = field(init=False)  # inputs of a chunk
    hidden: Tensor = field(init=False)  # [W, h], hidden states of the last chunk
    images: ChunkImages = field(init=False)  # of the last chunk that has some
    _prompts: int = 0  # that have begun, those that begin together as one
    _uses: dict[Kind, tuple[int, int]] = field(default_factory=dict)  # see `_is_common`

    def __post_init__(self) -> None:
        """Allocate what the widest chunk needs."""
        table = self.decoder.embedding
        widest = CHUNK_WIDTHS[-1] if self.longer else SEQUENCE_TOKENS
        self.buffers = new_step_buffers(widest, table.device)
        shape = widest, table.shape[1]
        self.hidden = torch.zeros(shape, dtype=table.dtype, device=table.device)
        self.images = new_chunk_images(self.hidden)

    def takes(self, tokens: int) -> bool:
        """True if a chunk of so many tokens is padded; others are launched as they are."""
        return tokens <= SEQUENCE_TOKENS or (self.longer and tokens <= CHUNK_WIDTHS[-1])

    def run(self, plan: StepPlan, ids: Numbers[int], shifts: Tensor, begins: bool) -> Tensor:
        """Run the next chunks of prompts through the layers; see `takes` and `Runner.chunk`.

        Args:
            plan: of the chunks without padding.
            ids: their tokens.
            shifts: see `step_of`.
            begins: one of them is the first of its prompt.

        Returns:
            [len(ids), h] hidden states, or [B, h] of each prompt's last token, until the next
            chunk runs.
        """
        kind = wide, images = self.padded(plan), plan.axes is not None
        self.buffers.write(plan.spans, ids, wide.tokens, padding_ends(plan, wide))
        if images:
            self.images.write(plan)
        self._prompts += begins
        if self._is_common(kind):
            self.graphs.replay(kind, lambda: self.forward(wide, shifts, images))
        else:
            self.forward(wide, shifts, images)
        self._count(kind)
        return self.hidden[: plan.sequences if plan.ending == "last" else plan.tokens]

    def padded(self, plan: StepPlan) -> StepPlan:
        """Plan that all chunks of a kind share: their width, without own spans and axes."""
        short, together = not plan.prompt, plan.sequences > 1
        M = width_of(plan.tokens, short, together)
        longest = min(longest_for(M), SEQUENCE_TOKENS) if short else M
        # Padding of short ones counts as other sequences, which are as long as the longest at most
        others = -(-M // longest) if together else 1
        return StepPlan(
            tokens=M,
            sequences=(PACK_SEQUENCES if together else 1) + short * others,
            max_kv_len=plan.max_kv_len if short else self.tables.shape[1] * PAGE,
            longest=longest,
            spans=() if short or together else (Span(SCRATCH, 0, M),),
            prompt=plan.prompt,
            ending=plan.ending,
            shifted=plan.shifted,
        )

    def forward(self, plan: StepPlan, shifts: Tensor, images: bool = False) -> None:
        """Run the tokens in `buffers`: all that the host knows of them is in the arguments.

        Args:
            plan: see `padded`.
            shifts: see `step_of`.
            images: the chunk has parts of images, which `self.images` holds.
        """
        ids, step = self.buffers.ids[: plan.tokens], self.buffers.step(plan, self.tables, shifts)
        if images:
            step = self.images.step(step)
        hidden = last_of(self.layers(ids, step))
        self.hidden[: len(hidden)] = hidden

    def _is_common(self, kind: Kind) -> bool:
        """True if LAUNCHED prompts have had such a chunk before: a lone one gains nothing."""
        count, last = self._uses.get(kind, (0, 0))
        return count + (last != self._prompts) > LAUNCHED

    def _count(self, kind: Kind) -> None:
        """Count a chunk that has run, as one for all of its prompt: its kernels are compiled."""
        count, last = self._uses.get(kind, (0, 0))
        if last != self._prompts or not count:
            self._uses[kind] = count + 1, self._prompts


def new_chunks(
    decoder: Decoder, layers: RunLayers, tables: Tensor, beside: Graphs
) -> Chunks | None:
    """Chunks that may be replayed; None on a CPU.

    Longer ones are padded on Hopper alone, since PyTorch's attention, which other GPUs take, needs
    the length of the sequence on the host; and not with experts, which padding would choose, too.
    """
    if not tables.is_cuda:
        return None
    hopper = torch.cuda.get_device_capability(tables.device)[0] == 9
    longer = hopper and decoder.config.experts is None
    graphs = Graphs(beside=beside, most=MOST_CHUNKS if longer else MOST_SHORT)
    return Chunks(decoder, layers, tables, graphs, longer)


def padding_ends(plan: StepPlan, wide: StepPlan) -> list[int]:
    """Ends of the sequences of padding of a chunk; see `columns_of` and `Step.starts`.

    Args:
        plan: of the chunk.
        wide: the one that it is padded to.
    """
    more = range(1, 1 + wide.sequences - plan.sequences)
    longest = 0 if wide.prompt else wide.longest
    return [min(plan.tokens + longest * place, wide.tokens) for place in more]


def width_of(tokens: int, short: bool, together: bool = False) -> int:
    """Tokens that a chunk of so many, at most the last of CHUNK_WIDTHS, is padded to.

    Args:
        short: it takes the kernels of a decode step.
        together: it is of several prompts.
    """
    shorter = PACK_WIDTHS if together else SHORT_WIDTHS
    return next(width for width in (shorter if short else CHUNK_WIDTHS) if width >= tokens)
