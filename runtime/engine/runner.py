"""The runner: sends chunks of prompts, and decode steps as CUDA graphs, to the device.

A decode step takes one token of every running sequence. Its inputs are tensors that never move; it
writes the chosen tokens and the next positions there, so the next step needs nothing from the host.
The host reads the tokens a step later from page-locked memory.
"""

from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lowbit.formats.kv_cache import CacheType, plain_cache
from lowbit.runtime.backends.cpu_linear import CpuLinear
from lowbit.runtime.engine.chunks import Chunks, new_chunks
from lowbit.runtime.engine.graphs import Graphs, reach_for, width_for
from lowbit.runtime.engine.results import PlainStep, Results
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.engine.speculate.dflash import Blocks
from lowbit.runtime.engine.speculate.handover import leave_rounds
from lowbit.runtime.models.architectures import BlockDrafter
from lowbit.runtime.models.layer_parts import last_of
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.device_state import CacheSize, DeviceState, kv_pages, new_state
from lowbit.runtime.state.host_rings import to_device, write_rows
from lowbit.runtime.state.pages import pages_for
from lowbit.runtime.state.round_inputs import new_trail
from lowbit.runtime.state.sampler import SamplerRows, new_sampler_rows
from lowbit.runtime.state.snapshots import Snapshots
from lowbit.runtime.state.step import NO_SLOT, Span, Step
from lowbit.runtime.thresholds import ROUND_TOKENS, SEQUENCE_TOKENS

ALIGNED = 16  # kept logits: their rows are a multiple of so many
POSITIONS, ROWS, READ, WRITE, ORIGINS, TOKENS = range(6)  # rows of `Runner.numbers`


@dataclass(slots=True)
class Runner:
    """A model with the state of its sequences.

    Attributes:
        decoder: the model.
        state: pages and slots; a sequence's slot has the number of its row, or is a spare one after
            a round with drafts.
        sampler: a row for each sequence.
        context: most tokens of a sequence.
        snapshots: recurrent states that the host keeps for later prompts.
        spare: slots for states after drafts; None without linear layers.
        tables: [R, T / PAGE] int32 block tables by row.
        batch: sequences of the last plain step, in the order of its tokens.
        trail: [R, TRAIL, h] hidden states of the last positions, see `round_inputs`; None without
            an MTP head.
        blocks: block drafter; None without one.
        ids: [W] int64, tokens of the next plain step, W >= R - 1.
        known: [W] int64, those that the host knows.
        firsts: [R] int64 by row, token of a sequence that was not in the last plain step.
        tokens: [2 W + R] int64, these three, where a step finds its tokens.
        inputs: [4, W] int32, their POSITIONS, ROWS, READ, WRITE.
        numbers: [6, W] int32, `inputs`, then where each token is found in `tokens`, and `known`.
        results: host memory that steps write to.
        graphs: recorded steps.
        chunks: runs chunks of prompts that may be replayed; None where all are launched.
        chunk_tokens: most tokens of a chunk; None for as many as the scheduler gives.
    """

    decoder: Decoder
    state: DeviceState
    sampler: SamplerRows
    context: int
    snapshots: Snapshots
    spare: range | None
    tables: Tensor
    batch: list[Sequence] = field(default_factory=list)
    trail: Tensor | None = None
    blocks: Blocks | None = None
    chunk_tokens: int | None = None
    ids: Tensor = field(init=False)
    known: Tensor = field(init=False)
    firsts: Tensor = field(init=False)
    tokens: Tensor = field(init=False)
    inputs: Tensor = field(init=False)
    numbers: Tensor = field(init=False)
    results: Results = field(init=False)
    graphs: Graphs = field(default_factory=Graphs)
    chunks: Chunks | None = field(init=False)
    _starts: Tensor = field(init=False)  # [W + 1] int32, 0, 1, 2...: a token a sequence
    _kept: Tensor = field(init=False)  # [W or ROUND_TOKENS, V] float32 of `keep`, empty before

    def __post_init__(self) -> None:
        """Allocate the inputs of the largest step."""
        rows, device = self.tables.shape[0], self.state.device
        widest = width_for(rows - 1)
        self.tokens = torch.zeros(2 * widest + rows, dtype=torch.int64, device=device)
        self.ids, self.known = self.tokens[: 2 * widest].view(2, widest)
        self.firsts = self.tokens[2 * widest :]
        self.numbers = torch.zeros(6, widest, dtype=torch.int32, device=device)
        self.inputs = self.numbers[:ORIGINS]
        self._starts = torch.arange(widest + 1, dtype=torch.int32, device=device)
        self.results = Results(rows, self.on_gpu)
        self._kept = torch.empty(0)
        self.chunks = new_chunks(self.decoder, self.state, self.tables, self.graphs)

    @property
    def on_gpu(self) -> bool:
        """True if steps are CUDA graphs, which the host does not wait for."""
        return self.tables.is_cuda

    @property
    def cache_bytes(self) -> int:
        """Memory of keys, values and recurrent states, a drafter's included; no snapshots."""
        beside = 0 if self.blocks is None else self.blocks.pages.size_bytes
        return self.state.size_bytes + self.snapshots.staged_bytes + beside

    @property
    def rows(self) -> int:
        """Most sequences that are decoded together."""
        return self.tables.shape[0] - 1

    def open(self, sequence: Sequence, snapshot: int | None) -> None:
        """Write the block table, the sampler row and the first recurrent state of a sequence.

        Args:
            sequence: with its row and pages.
            snapshot: of the state after the tokens that it reuses; None if it reuses none.
        """
        row, pages = sequence.row, sequence.pages
        self.tables[row, : len(pages)] = self.ints(pages)
        if self.state.recurrent:
            if snapshot is None:
                self.state.slots.clear(row)
            else:
                self.snapshots.restore(snapshot, row)
        params = replace(sequence.request.sampling, seed=sequence.seed)
        masked = sequence.request.constraint is not None
        self.sampler.configure_row(row, params, sequence.request.prompt, masked)

    def close(self, sequence: Sequence) -> None:
        """Clear the sampler row of a sequence."""
        self.sampler.clear_row(sequence.row)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page to another, in the drafter's pages too."""
        self.state.pages.copy(source, target)
        if self.blocks is not None:
            self.blocks.pages.copy(source, target)

    def chunk(self, sequence: Sequence, ids: Numbers[int], last: bool = False) -> Iterator[Tensor]:
        """Run the next tokens of a prompt through the layers; steps may be run between two.

        Args:
            sequence: whose prompt it is.
            ids: of the tokens.
            last: only the last token's hidden state is wanted.

        Yields:
            [M, h] output of each layer, or of the last one alone where the chunk is replayed; the
            last row is that of the last token. That of the last layer is valid until the next chunk
            runs.
        """
        if self.chunks is not None and self.chunks.takes(len(ids)):
            yield self.chunks.run(sequence, ids, last)
            return
        count, first, row = len(ids), sequence.length, sequence.row
        write = [NO_SLOT] * (count - 1) + [row]
        inputs = self.ints([ids, range(first, first + count), [row] * count, write])
        step = Step(
            positions=inputs[1],
            rows=inputs[2],
            starts=self.ints([0, count]),
            tables=self.tables,
            read=inputs[2, :1],
            write=inputs[3],
            reach=reach_for(first + count, self.context),
            longest=count,
            spans=(Span(row, first, count, tuple(sequence.pages), row, tuple(write)),),
        )
        if count > SEQUENCE_TOKENS:
            step = replace(step, prompt=True, ending="last" if last else "apart")
        yield from self._each_layer(inputs[0].long(), step)

    def begin(self, sequence: Sequence, hidden: Tensor) -> PlainStep:
        """Choose the first new token of a sequence, by its prompt's last hidden state [1, h]."""
        row, logits = sequence.row, self.decoder.logits(hidden)
        rows, positions = self.ints([row]), self.ints([sequence.length - 1])
        self.choose_tokens(logits, rows, positions, self.firsts[row : row + 1])
        return PlainStep([sequence], self.results, self.results.record())

    def decode(self, sequences: list[Sequence]) -> PlainStep:
        """Send a plain step: run the last token of every sequence and choose the next ones."""
        M, reach, spans = self._prepare(sequences)
        self._run((M, reach, self.sampler.shape), M, lambda: self._decode(M, reach, spans))
        _count_sent(sequences)
        return PlainStep(sequences, self.results, self.results.record())

    def forward(self, sequences: list[Sequence]) -> None:
        """Send the first half of `decode`, up to the logits."""
        M, reach, spans = self._prepare(sequences)
        self.make_room_to_keep()
        self._run((M, reach), M, lambda: self._forward(M, reach, spans))
        _count_sent(sequences)

    def choose(self, sequences: list[Sequence]) -> PlainStep:
        """Send the second half of `decode`, under the masks that the sequences have now."""
        M = self.width(len(sequences))
        self._run((M, self.sampler.shape), M, lambda: self._choose_next(M))
        return PlainStep(sequences, self.results, self.results.record())

    def width(self, tokens: int) -> int:
        """Tokens of a step, with padding on a GPU, so that few steps are recorded."""
        return width_for(tokens) if self.on_gpu else tokens

    def _prepare(self, sequences: list[Sequence]) -> tuple[int, int, tuple[Span, ...]]:
        """Write the inputs of a plain step; returns width, reach and, on a CPU, the spans."""
        if sequences != self.batch:
            self._compose(sequences)
        reach = reach_for(max(each.length for each in sequences) + 1, self.context)
        spans = () if self.on_gpu else plain_spans(sequences)
        return self.width(len(sequences)), reach, spans

    def _decode(self, M: int, reach: int, spans: tuple[Span, ...]) -> None:
        inputs = self.inputs[:, :M]
        logits = self._logits_of(M, reach, spans)
        self.choose_tokens(logits, inputs[ROWS], inputs[POSITIONS], self.ids[:M])

    def _forward(self, M: int, reach: int, spans: tuple[Span, ...]) -> None:
        self.keep(self._logits_of(M, reach, spans))

    def _choose_next(self, M: int) -> None:
        inputs = self.inputs[:, :M]
        self.choose_tokens(self.kept(M), inputs[ROWS], inputs[POSITIONS], self.ids[:M])

    def make_room_to_keep(self) -> None:
        """Allocate the tensor that keeps logits on a GPU, before half a step is recorded."""
        if self.on_gpu and not len(self._kept):
            padded = self.decoder.config.vocab_size
            self._kept = new_kept(self.rows, self.sampler.vocabulary, padded, self.ids.device)

    def keep(self, logits: Tensor) -> None:
        """Keep the logits [M, V or more] of the first half of a step for the second half."""
        if self.on_gpu:
            self._kept[: len(logits)].copy_(logits[:, : self._kept.shape[1]])
        else:
            self._kept = logits

    def kept(self, M: int) -> Tensor:
        """Logits [M, V] that `keep` was given."""
        return self._kept[:M]

    def _logits_of(self, M: int, reach: int, spans: tuple[Span, ...]) -> Tensor:
        """Logits after the token of each sequence: [M, V or more]."""
        inputs = self.inputs[:, :M]
        step = Step(
            positions=inputs[POSITIONS],
            rows=inputs[ROWS],
            starts=self._starts[: M + 1],
            tables=self.tables,
            read=inputs[READ],
            write=inputs[WRITE],
            reach=reach,
            longest=1,
            spans=spans,
        )
        return self.logits_of(self.ids[:M], step)

    def logits_of(self, ids: Tensor, step: Step) -> Tensor:
        """Logits after every token of a decode step, [M, V or more]; leaves the trail."""
        hidden = last_of(self._each_layer(ids, step))
        if self.trail is not None:
            self.decoder.ops.leave_rows(hidden, step.rows, step.positions, self.trail)
        return self.decoder.logits(hidden)

    def _each_layer(self, ids: Tensor, step: Step) -> Iterator[Tensor]:
        """Run tokens through the layers, and pass hidden states to the block drafter: [M, h]."""
        layers = self.decoder.each_layer(ids, self.state, step)
        if self.blocks is None:
            yield from layers
            return
        hidden_taps = self.blocks.hidden_taps(len(ids))
        for index, hidden in enumerate(layers):
            hidden_taps.take(index, hidden)
            yield hidden
        self.blocks.read(hidden_taps, step)

    def choose_tokens(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        token: Tensor,
        masks: Tensor | None = None,
    ) -> None:
        """Choose a token for each row; positions become those of the tokens. See `Ops.choose`."""
        ops = self.decoder.ops
        results = self.results
        ops.choose(logits, self.sampler, rows, positions, token, results.ring, masks)
        if self.sampler.shape.logprobs:
            ops.log_probabilities(
                logits,
                self.sampler.vocabulary,
                rows,
                positions,
                token,
                results.log_probabilities,
            )

    def _run(self, key: Hashable, M: int, step: Callable[[], None]) -> None:
        """Run a part of a plain step of M sequences."""
        self.launch(self.graphs, key, step, (self.ids[:M], self.inputs[:, :M]))

    def launch(
        self,
        graphs: Graphs,
        key: Hashable,
        step: Callable[[], None],
        inputs: Numbers[Tensor],
        kept: Numbers[Tensor] = (),
    ) -> None:
        """Run a step as a graph on a GPU, see `Graphs.run`, and as it is on a CPU."""
        if self.on_gpu:
            graphs.run(key, step, inputs, kept)
        else:
            step()

    def _compose(self, sequences: list[Sequence]) -> None:
        """Write the inputs of a step whose sequences differ from those of the last one.

        The token of a sequence comes from the last step, from `firsts`, or from the host.
        """
        known = leave_rounds(self, sequences)
        wide, firsts = len(self.ids), len(self.ids) + len(self.known)
        before = {id(each): index for index, each in enumerate(self.batch)}
        origins = [
            before.get(id(each), firsts + each.row) if token is None else wide + index
            for index, (each, token) in enumerate(zip(sequences, known, strict=True))
        ]
        rows = [each.row for each in sequences]
        tokens = [token or 0 for token in known]
        columns = ([each.length for each in sequences], rows, rows, rows, origins, tokens)
        write_rows(self.numbers, columns)  # tokens beyond these have row 0, SCRATCH: nobody's
        if any(token is not None for token in known):
            self.known.copy_(self.numbers[TOKENS])
        self.ids.copy_(self.tokens.index_select(0, self.numbers[ORIGINS]))
        self.batch = list(sequences)

    def ints(self, values: object) -> Tensor:
        """Copy numbers to the device as int32; see `to_device`."""
        return to_device(values, torch.int32, self.state.device)


def _count_sent(sequences: list[Sequence]) -> None:
    """Count a token of each sequence as sent, and the next one as chosen."""
    for each in sequences:
        each.length += 1
        each.chosen += 1


def plain_spans(sequences: list[Sequence]) -> tuple[Span, ...]:
    """Spans of a plain step."""
    return tuple(
        Span(each.row, each.length, 1, tuple(each.pages), each.row, (each.row,))
        for each in sequences
    )


def new_kept(sequences: int, vocabulary: int, padded: int, device: str | torch.device) -> Tensor:
    """Room for the logits of the largest step, [W or ROUND_TOKENS, V] float32, rows aligned.

    Args:
        sequences: decoded together at most.
        vocabulary: real tokens.
        padded: tokens that the model has logits for.
        device: that they lie on.
    """
    widest = max(width_for(sequences), ROUND_TOKENS)
    logits = min(-(-vocabulary // ALIGNED) * ALIGNED, padded)
    return torch.empty(widest, logits, dtype=torch.float32, device=device)


def new_runner(
    decoder: Decoder,
    vocabulary: int,
    cache: CacheSize,
    dtype: torch.dtype,
    device: str,
    drafter: BlockDrafter[CpuLinear] | None = None,
    cache_type: CacheType | None = None,
    chunk_tokens: int | None = None,
) -> Runner:
    """A runner with empty pages and slots.

    Args:
        decoder: the model.
        vocabulary: real tokens; ids from here on are padding and never chosen.
        cache: size of the cache.
        dtype: of activations and recurrent states.
        device: `cpu` or `cuda`.
        drafter: block drafter, on a CPU; None for none.
        cache_type: of keys and values; None for activations as they are.
        chunk_tokens: see `Runner`.
    """
    cache_type = cache_type or plain_cache(dtype)
    rows, config, head = cache.rows, decoder.config, decoder.mtp is not None
    state = new_state(config, cache.all_pages, cache.slots, dtype, device, cache_type, head)
    trail = new_trail(rows, config.hidden_size, dtype, device) if head else None
    tables = torch.zeros(rows, pages_for(cache.context), dtype=torch.int32, device=device)
    sampler = new_sampler_rows(rows, vocabulary, device)
    blocks = None
    if drafter is not None:
        beside = kv_pages(drafter.config, cache.all_pages, cache_type, device)
        blocks = Blocks(drafter, beside, tables, sampler)
    return Runner(
        decoder=decoder,
        state=state,
        sampler=sampler,
        context=cache.context,
        snapshots=Snapshots(state.slots, cache.snapshots, staged=device != "cpu"),
        spare=range(cache.slots - cache.drafts, cache.slots) if state.recurrent else None,
        tables=tables,
        trail=trail,
        blocks=blocks,
        chunk_tokens=chunk_tokens,
    )
