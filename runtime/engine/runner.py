"""The runner: sends chunks of prompts, and decode steps as CUDA graphs, to the device.

A decode step takes one token of every running sequence. Its inputs are tensors that never move; it
writes the chosen tokens and the next positions there, so the next step needs nothing from the host.
The host reads the tokens a step later from page-locked memory.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from lowbit.runtime.engine.chunks import Chunks, new_chunks
from lowbit.runtime.engine.draft_source import ContextReader
from lowbit.runtime.engine.graphs import Graphs, round_kv_len, width_for
from lowbit.runtime.engine.kept_logits import KeptLogits
from lowbit.runtime.engine.parallel.link import GpuLink, unembedded
from lowbit.runtime.engine.parallel.tasks import RunChunk, RunHead, RunStep, SetPages, SetShift
from lowbit.runtime.engine.plan import CHUNK, Capacity, Change, CloseRow, OpenRow
from lowbit.runtime.engine.results import PlainStep, Results
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.models.layer_parts import last_of
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.models.shared_decoder import Crew
from lowbit.runtime.state import changes
from lowbit.runtime.state.decode_inputs import DecodeInputs, new_decode_inputs
from lowbit.runtime.state.device_state import DeviceState
from lowbit.runtime.state.host_rings import to_device
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.sampler import SCRATCH, SamplerRows
from lowbit.runtime.state.snapshots import Snapshots
from lowbit.runtime.state.step import Step, StepPlan, parts_of
from lowbit.runtime.state.step_buffers import new_step
from lowbit.runtime.thresholds import EXACT_TOKENS, ROUND_TOKENS, SEQUENCE_TOKENS

T = TypeVar("T")


@dataclass(slots=True)
class Runner:
    """A model with the state of its sequences."""

    decoder: Decoder  # the model
    # Pages and slots; a sequence's slot has the number of its row, or is a spare one after a round
    # with drafts
    state: DeviceState
    sampler: SamplerRows  # a row for each sequence
    context: int  # most tokens of a sequence
    snapshots: Snapshots  # recurrent states that the host keeps for later prompts
    spare: range | None  # slots for states after drafts; None without linear layers
    tables: Tensor  # [R, T / PAGE] int32 block tables by row
    # Sequences of the last plain step, in the order of its tokens
    batch: list[Sequence] = field(default_factory=list)
    # [R, HIDDEN_RING, h] hidden states of the last positions, see `decode_inputs`; None without an
    # MTP head
    hidden_ring: Tensor | None = None
    # Pages of a head for multi-token prediction that has its own; None where it uses the model's
    head_pages: KVPages | None = None
    blocks: ContextReader | None = None  # block drafter that reads every step; None without one
    crew: Crew | None = None  # the other ranks of the model; None without any
    link: GpuLink | None = None  # to other GPUs that share the model; None without any
    chunk_tokens: int = CHUNK  # most tokens of a chunk
    # Most tokens of a decode step that pass the layers together, a multiple of EXACT_TOKENS; more
    # are cut into parts
    part_tokens: int = EXACT_TOKENS
    inputs: DecodeInputs = field(init=False)  # of the next decode step
    results: Results = field(init=False)  # host memory that steps write to
    kept: KeptLogits = field(init=False)  # between the halves of a step
    graphs: Graphs = field(default_factory=Graphs)  # recorded steps
    # Runs chunks of prompts that may be replayed; None where all are launched
    chunks: Chunks | None = field(init=False)
    # [ROUND_TOKENS] int32, row of the sampler's mask for each token of a round
    masks: Tensor = field(init=False)
    # [R] int32 by row, see `step_of`: right for sequences that run, once `shift` has been called
    shifts: Tensor = field(init=False)
    _shifts: list[int | None] = field(init=False)  # the same on the host; None where not known
    _shifted: bool = False  # a sequence of `batch` has images

    def __post_init__(self) -> None:
        """Allocate the inputs of the largest step."""
        rows = self.tables.shape[0]
        self.inputs = new_decode_inputs(width_for(self.rows), rows, self.state.device)
        self.results = Results(rows, self.on_gpu)
        sizes = self.rows, self.sampler.vocabulary, self.decoder.config.vocab_size
        self.kept = KeptLogits(*sizes, self.state.device)
        self.masks = self.ints(range(rows, rows + ROUND_TOKENS))
        self._shifts = [0] * rows
        self.shifts = self.ints(self._shifts)
        self.chunks = new_chunks(self.decoder, self.each_layer, self.tables, self.graphs)

    @property
    def on_gpu(self) -> bool:
        """True if steps are CUDA graphs, which the host does not wait for."""
        return self.tables.is_cuda

    @property
    def cache_bytes(self) -> int:
        """Memory of keys, values and recurrent states, a drafter's included; no snapshots."""
        beside = sum(pages.size_bytes for pages in self._other_pages)
        return self.state.size_bytes + self.snapshots.staged_bytes + beside

    @property
    def head_state(self) -> DeviceState:
        """State in which a head for multi-token prediction keeps keys and values."""
        return self.state if self.head_pages is None else replace(self.state, pages=self.head_pages)

    @property
    def _other_pages(self) -> list[KVPages]:
        """Pages beside those of the model, with the same numbers."""
        of_blocks = None if self.blocks is None else self.blocks.pages
        return [pages for pages in (self.head_pages, of_blocks) if pages is not None]

    @property
    def rows(self) -> int:
        """Most sequences that are decoded together."""
        return self.tables.shape[0] - 1

    @property
    def capacity(self) -> Capacity:
        """Sizes that the scheduler divides among sequences."""
        return Capacity(
            rows=self.rows,
            pages=self.state.pages.count,
            snapshots=self.snapshots.count,
            recurrent=self.state.recurrent,
            chunk=self.chunk_tokens,
        )

    @property
    def pack_tokens(self) -> int:
        """Most tokens of chunks of several prompts that pass the layers together, see `packs`.

        Where more than EXACT_TOKENS of a step do so, no linear's bits depend on their number.
        """
        if self.chunks is None or not self.chunks.longer or self.blocks is not None:
            return 0
        return self.chunk_tokens if self.part_tokens > EXACT_TOKENS else EXACT_TOKENS

    @property
    def pack_keys(self) -> int | None:
        """Most keys of the prompts of a pack, whose codes are widened; None for any number."""
        return self.context if self.state.pages.quantized else None

    def apply(self, decided: Iterable[Change]) -> None:
        """Make what the scheduler has decided, behind the steps under way."""
        for change in decided:
            match change:
                case OpenRow():
                    self._open(change)
                case changes.SaveSnapshot() | changes.PrepareSnapshot():
                    self._change(change)
                case CloseRow(row, scores):
                    self.sampler.clear_row(row)
                    if scores is not None:
                        self.results.hold(scores)

    def reset(self) -> None:
        """Forget all sequences."""
        self.batch = []
        self._shifts = [None] * len(self._shifts)
        for row in range(1, 1 + self.rows):
            self.sampler.clear_row(row)

    def _open(self, change: OpenRow) -> None:
        sequence, snapshot = change.sequence, change.snapshot
        if change.copied is not None:
            self._copy_page(*change.copied)
        row, pages = sequence.row, tuple(sequence.pages)
        self.together(SetPages(row, pages), partial(self.set_pages, row, pages))
        if self.state.recurrent:
            clear = changes.ClearSlot(row)
            self._change(clear if snapshot is None else changes.RestoreSnapshot(snapshot, row))
        params = replace(sequence.request.sampling, seed=sequence.seed)
        masked = sequence.request.constraint is not None
        self.sampler.configure_row(row, params, sequence.request.prompt, masked)

    def _change(self, change: changes.StateChange) -> None:
        """Change the state of the sequences, on other ranks too."""
        work = partial(changes.make_change, change, self.state, self.snapshots)
        if self.crew is None:
            work()
        else:
            self.crew.run(change, work)

    def set_pages(self, row: int, pages: Numbers[int]) -> None:
        """Write the block table of a sequence, behind the steps under way."""
        self.tables[row, : len(pages)] = self.ints(pages)

    def together(self, task: object, work: Callable[[], T]) -> T:
        """Do some work of steps, which other GPUs that share the model do too."""
        return work() if self.link is None else self.link.together(task, work)

    def _copy_page(self, source: int, target: int) -> None:
        self._change(changes.CopyPage(source, target))
        for pages in self._other_pages:
            pages.copy(source, target)

    def chunk(self, sequences: Numbers[Sequence], last: bool = False) -> Iterator[Tensor]:
        """Run the next chunks of prompts through the layers; steps may be run between two.

        Args:
            sequences: several of up to `pack_tokens` in all, see `fill_pack`; images only with one.
            last: only the last tokens' hidden states are wanted.

        Yields:
            [M, h] output of each layer, or of the last one alone where the chunk is replayed; that
            of the last layer may be [B, h] where `last`, of the last token of each. It is valid
            until the next chunk runs.
        """
        first, images = sequences[0].length, sequences[0].images
        counts = [each.next_count for each in sequences]
        ids = [id for each in sequences for id in each.request.prompt[each.length : each.next_stop]]
        axes = None if images is None else images.axes(first, counts[0])
        shifts = [self.shift(each, each.length) for each in sequences if axes is None]
        prompt = max(counts) > SEQUENCE_TOKENS
        plan = StepPlan(
            tokens=len(ids),
            sequences=len(sequences),
            max_kv_len=self.kv_len_for(max(each.next_stop for each in sequences)),
            longest=max(counts),
            spans=tuple(map(Sequence.next_span, sequences, counts)),
            prompt=prompt,
            ending="together" if not prompt else "last" if last else "apart",
            embedded=() if images is None else images.embedded(first, counts[0]),
            axes=axes,
            shifted=any(shifts),
        )
        begins = any(each.length == each.reused for each in sequences)
        if self.link is not None:
            task = RunChunk(unembedded(plan), tuple(ids), begins)
            yield self.together(task, partial(self.run_chunk, plan, ids, begins))
        elif self.chunks is not None and self.chunks.takes(len(ids)):
            yield self.chunks.run(plan, ids, self.shifts, begins)
        else:
            yield from self.each_layer(*new_step(plan, ids, self.tables, self.shifts))

    def run_chunk(self, plan: StepPlan, ids: Numbers[int], begins: bool) -> Tensor:
        """Run chunks to their end: output of the last layer; see `chunk` and `Chunks.run`."""
        if self.link is not None:
            plan = self.link.share_embedded(plan, self.decoder.embedding)
        if self.chunks is not None and self.chunks.takes(plan.tokens):
            return self.chunks.run(plan, ids, self.shifts, begins)
        return last_of(self.each_layer(*new_step(plan, ids, self.tables, self.shifts)))

    def shift(self, sequence: Sequence, at: int) -> bool:
        """Set what is added to a sequence's positions for the angles of text from `at` on.

        It is the same for all text up to the next image.

        Returns:
            True if it is not 0.
        """
        row, shift = sequence.row, 0 if sequence.images is None else sequence.images.shift(at)
        if shift != self._shifts[row]:
            self._shifts[row] = shift
            self.together(SetShift(row, shift), partial(self.set_shift, row, shift))
        return shift != 0

    def set_shift(self, row: int, shift: int) -> None:
        """`shift` on this rank, behind the steps under way."""
        self.shifts[row].fill_(shift)  # an assignment would wait for the GPU

    def begin(self, sequences: list[Sequence], hidden: Tensor) -> PlainStep:
        """Choose the first new tokens of sequences, by their prompts' last hidden states [B, h]."""
        for each in sequences:
            self.shift(each, each.length)
        logits, rows = self.logits(hidden), self.ints([each.row for each in sequences])
        positions = self.ints([each.length - 1 for each in sequences])
        if len(sequences) == 1:  # a view, in place of a copy
            row = sequences[0].row
            self.choose_tokens(logits, rows, positions, self.inputs.firsts[row : row + 1])
        else:
            tokens = torch.empty(len(rows), dtype=self.inputs.firsts.dtype, device=rows.device)
            self.choose_tokens(logits, rows, positions, tokens)
            self.inputs.firsts.index_copy_(0, rows.long(), tokens)
        return PlainStep(list(sequences), self.results, self.results.record())

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits outside of a step: [M, h] to [M, V or more] float32."""
        return self.together(RunHead(len(hidden)), partial(self.run_head, hidden))

    def run_head(self, hidden: Tensor) -> Tensor:
        """`logits` on this rank; hidden states of the first one take the place of others."""
        if self.link is not None:
            self.link.share_hidden(hidden)
        return self.decoder.logits(hidden)

    def decode(self, sequences: list[Sequence]) -> PlainStep:
        """Send a plain step: run the last token of every sequence and choose the next ones."""
        plan = self._prepare(sequences)
        self.send(self.graphs, ("decode", plan, self.sampler.shape), self.run_step, plan)
        for each in sequences:
            each.count_sent()
        return PlainStep(sequences, self.results, self.results.record())

    def forward(self, sequences: list[Sequence]) -> None:
        """Send the first half of `decode`, up to the logits."""
        plan = self._prepare(sequences)
        self.make_room_to_keep()
        self.send(self.graphs, ("forward", plan), self.run_layers, plan)
        for each in sequences:
            each.count_sent()

    def choose(self, sequences: list[Sequence]) -> PlainStep:
        """Send the second half of `decode`, under the masks that the sequences have now."""
        M = self.width(len(sequences))
        plan = StepPlan(tokens=M, sequences=M, max_kv_len=0, longest=1)
        self.send_choice(self.graphs, ("choose", M, self.sampler.shape), plan)
        return PlainStep(sequences, self.results, self.results.record())

    def kv_len_for(self, tokens: int, width: int = 1) -> int:
        """Round the length of the longest sequence of a step up; see `round_kv_len`."""
        return round_kv_len(tokens, self.context, width)

    def width(self, tokens: int) -> int:
        """Tokens of a step, with padding on a GPU, so that few steps are recorded."""
        return width_for(tokens) if self.on_gpu else tokens

    def _prepare(self, sequences: list[Sequence]) -> StepPlan:
        """Write the inputs of a plain step whose sequences differ from those of the last one."""
        M = self.width(len(sequences))
        recomposed = sequences != self.batch
        spans = () if self.on_gpu and not recomposed else [each.next_span(1) for each in sequences]
        if recomposed:
            known = self.leave_rounds(sequences)
            places = {id(each): place for place, each in enumerate(self.batch)}
            before = [places.get(id(each)) for each in sequences]
            self.inputs.write_plain(spans, known, before, M)
            self.batch = list(sequences)
            self._shifted = any(each.shift for each in sequences)
        return StepPlan(
            tokens=M,
            sequences=M,
            max_kv_len=self.kv_len_for(max(each.length for each in sequences) + 1, M),
            longest=1,
            spans=() if self.on_gpu else tuple(spans),
            shifted=self._shifted,
        )

    def run_step(self, plan: StepPlan) -> None:
        """Run tokens through the layers, and choose one behind each."""
        for part, logits in self._logits_of(plan):
            self._choose(logits, part)
            del logits  # before those of the next part take as much memory

    def run_unchosen(self, plan: StepPlan) -> None:
        """Run a step of the first rank, which chooses its tokens, on another."""
        for _ in self._logits_of(plan):
            pass

    def run_layers(self, plan: StepPlan) -> None:
        """Run the first half of `run_step`, up to the logits."""
        for part, logits in self._logits_of(plan):
            self.kept.keep(logits, part)
            del logits

    def run_choice(self, plan: StepPlan) -> None:
        """Run the second half of `run_step`; of a round, under a mask for each token."""
        masks = self.masks[: plan.tokens] if plan.drafts else None
        for part in parts_of(plan, EXACT_TOKENS):
            self._choose(self.kept.of(part), part, masks)

    def _choose(self, logits: Tensor, plan: StepPlan, masks: Tensor | None = None) -> None:
        M, step = plan.tokens, self.inputs.step
        part = slice(plan.first, plan.first + M)
        rows, positions, chosen = step.rows[part], step.positions[part], self.inputs.chosen[part]
        if not plan.ordered:
            self.choose_tokens(logits, rows, positions, chosen, masks)
            return
        tokens = torch.empty_like(chosen)
        for place in range(plan.longest):
            now = step.places[:M] == place
            if self.on_gpu or not rows.is_cpu:  # of one size, whatever the drafts
                these = rows.masked_fill(~now, SCRATCH)
                self.choose_tokens(logits, these, positions, tokens, masks)
                chosen.copy_(torch.where(now, tokens, chosen))
                continue
            moved, token = positions[now], chosen[now]
            used = None if masks is None else masks[now]
            self.choose_tokens(logits[now], rows[now], moved, token, used)
            positions[now], chosen[now] = moved, token

    def make_room_to_keep(self) -> None:
        """Allocate the tensor that keeps logits on a GPU, before half a step is recorded."""
        if self.on_gpu and not self.kept.fixed:
            self.kept.make_room()

    def _logits_of(self, plan: StepPlan) -> Iterator[tuple[StepPlan, Tensor]]:
        """Logits [M, V or more] behind every token of a step; stores the hidden states.

        Yields:
            Parts of at most EXACT_TOKENS tokens with their logits. The head never takes more, so
            that its bits stay the same and logits take no more memory.
        """
        for together in parts_of(plan, self.part_tokens):
            hidden = self._hidden_of(together)
            for part in parts_of(together, EXACT_TOKENS):
                at = part.first - together.first
                yield part, self.decoder.logits(hidden[at : at + part.tokens])

    def _hidden_of(self, plan: StepPlan) -> Tensor:
        """Output of the layers for the tokens of a step or of a part, [M, h]."""
        link, inputs = self.link, self.inputs
        ids = self._ids_of(plan) if link is None else link.share_inputs(inputs, plan)
        step = self.inputs.step.step(plan, self.tables, self.shifts)
        hidden = last_of(self.each_layer(ids[plan.first : plan.first + plan.tokens], step))
        if self.hidden_ring is not None:
            self.decoder.ops.store_hidden(hidden, step.rows, step.positions, self.hidden_ring)
        return hidden

    def _ids_of(self, plan: StepPlan) -> Tensor:
        return self.inputs.step.ids if plan.drafts else self.inputs.chosen

    def each_layer(self, ids: Tensor, step: Step) -> Iterator[Tensor]:
        """Run tokens through the layers; a block drafter reads outputs of some of them: [M, h]."""
        layers = self.decoder.each_layer(ids, self.state, step)
        if self.blocks is None:
            yield from layers
            return
        outputs: dict[int, Tensor] = {}
        for index, hidden in enumerate(layers):
            if index in self.blocks.layers:
                outputs[index] = hidden
            yield hidden
        self.blocks.read([outputs[index] for index in self.blocks.layers], step)

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

    def send(
        self, graphs: Graphs, key: Hashable, part: Callable[[StepPlan], None], plan: StepPlan
    ) -> None:
        """Launch `run_step` or its first half, on all ranks."""
        work = partial(self._launch_step, graphs, key, partial(part, plan), plan)
        self.together(RunStep(plan, fresh=self.on_gpu and key not in graphs), work)

    def send_choice(self, graphs: Graphs, key: Hashable, plan: StepPlan) -> None:
        """Launch the second half of `run_step`."""
        self._launch_step(graphs, key, partial(self.run_choice, plan), plan)

    def _launch_step(
        self, graphs: Graphs, key: Hashable, step: Callable[[], None], plan: StepPlan
    ) -> None:
        self.launch(graphs, key, step, (self._ids_of(plan), self.inputs.step.block[1:5]))

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

    def leave_rounds(self, sequences: Numbers[Sequence]) -> list[int | None]:
        """Bring the states of sequences that were in a round to where a plain step looks.

        Returns:
            The last token of each sequence that was in a round; None where it is on the device.
        """
        tokens: list[int | None] = []
        for each in sequences:
            if each.verified and each.slot != each.row:
                self._change(changes.CopySlot(each.slot, each.row))
                each.slot = each.row
            tokens.append(each.output[-1] if each.verified else None)
            each.verified = False
        return tokens

    def ints(self, values: object) -> Tensor:
        """Copy numbers to the device as int32; see `to_device`."""
        return to_device(values, torch.int32, self.state.device)
