"""Sends steps to the device: chunks of prompts, and decode steps as CUDA graphs.

A decode step takes one token of every running sequence. Its inputs lie in tensors that never move;
the step itself puts the chosen tokens and the next positions there, so that the next one can follow
without the host, which reads the chosen tokens a step later from page-locked memory.
"""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lowbit.runtime.engine.blocks import Blocks
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.rounds import step_spans
from lowbit.runtime.engine.sent import Flight, Sent, chosen_tokens
from lowbit.runtime.engine.sequence import Sequence, TokenLogProbabilities
from lowbit.runtime.engine.widths import reach_for, width_for
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.device_state import DeviceState
from lowbit.runtime.state.logprobs import LogProbabilities, new_log_probabilities
from lowbit.runtime.state.pages import SCRATCH
from lowbit.runtime.state.posted import PLACES, new_places, to_device
from lowbit.runtime.state.sampler_rows import SamplerRows
from lowbit.runtime.state.step import EXACT_TOKENS, NO_SLOT, Span, Step

ALIGNED = 16  # kept logits: their rows are a multiple of so many
POSITIONS, ROWS, READ, WRITE = range(4)  # rows of `Runner.inputs`


@dataclass(slots=True)
class Runner:
    """A decoder with the state of its sequences.

    Attributes:
        decoder: the model.
        state: pages and slots; a sequence's slot has the number of its row, or is a spare one after
            a round with drafts.
        sampler: a row for each sequence.
        context: most tokens of a sequence.
        snapshots: slots for states that are kept, behind those of the rows.
        spare: slots for states after drafts; None without linear layers.
        tables: [R, T / PAGE] int32 block tables by row.
        batch: sequences of the last decode step, in the order of its tokens.
        trail: [R, TRAIL, h], hidden state of the last positions, each at its position modulo TRAIL
            (see `links`); None where no head reads it.
        blocks: of a drafter beside the decoder; None without one.
        ids: [W] int64, tokens of the next step without drafts, W >= R - 1.
        inputs: [4, W] int32 of these: POSITIONS, ROWS, READ, WRITE.
        graphs: recorded steps.
    """

    decoder: Decoder
    state: DeviceState
    sampler: SamplerRows
    context: int
    snapshots: int
    spare: range | None
    tables: Tensor
    batch: list[Sequence] = field(default_factory=list)
    trail: Tensor | None = None
    blocks: Blocks | None = None
    ids: Tensor = field(init=False)
    inputs: Tensor = field(init=False)
    graphs: Graphs = field(default_factory=Graphs)
    _starts: Tensor = field(init=False)  # [W + 1] int32, 0, 1, 2...: a token a sequence
    _firsts: Tensor = field(init=False)  # [R] int64 by row, of a sequence new in a step
    _places: Tensor = field(init=False)  # of chosen tokens, see `posted`
    _kept: Tensor = field(init=False)  # [W or EXACT_TOKENS, V] float32 of `keep`, empty before
    _log_probabilities: LogProbabilities = field(init=False)

    def __post_init__(self) -> None:
        """Make room for the inputs of the largest step."""
        rows, device = self.tables.shape[0], self.state.device
        widest = width_for(rows - 1)
        self.ids = torch.zeros(widest, dtype=torch.int64, device=device)
        self.inputs = torch.zeros(4, widest, dtype=torch.int32, device=device)
        self._starts = torch.arange(widest + 1, dtype=torch.int32, device=device)
        self._firsts = torch.zeros(rows, dtype=torch.int64, device=device)
        self._places = new_places(rows, self.on_gpu)
        self._kept = torch.empty(0)
        self._log_probabilities = new_log_probabilities(rows, self.on_gpu)

    @property
    def on_gpu(self) -> bool:
        """True if steps are CUDA graphs that the host does not wait for."""
        return self.tables.is_cuda

    def open(self, sequence: Sequence, state_from: int | None) -> None:
        """Write a sequence's block table, sampler row and first recurrent state.

        Args:
            sequence: with its row and pages.
            state_from: slot with the state of the tokens that it reuses; None for none.
        """
        row, pages = sequence.row, sequence.pages
        self.tables[row, : len(pages)] = self.ints(pages)
        if self.state.recurrent:
            if state_from is None:
                self.state.slots.clear(row)
            else:
                self.state.slots.copy(state_from, row)
        params = replace(sequence.request.sampling, seed=sequence.seed)
        masked = sequence.request.constraint is not None
        self.sampler.configure_row(row, params, sequence.request.prompt, masked)

    def close(self, sequence: Sequence) -> None:
        """Free a sequence's row of the sampler."""
        self.sampler.clear_row(sequence.row)

    def copy_page(self, source: int, target: int) -> None:
        """Copy keys and values of a page."""
        beside = () if self.blocks is None else (self.blocks.pages,)
        for pages in (self.state.pages, *beside):
            for store in (pages.k, pages.v):
                store[:, target].copy_(store[:, source])

    def chunk(self, sequence: Sequence, ids: Numbers[int]) -> Tensor:
        """Send tokens through the layers that follow those of a sequence: [M, h]."""
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
            prompt=count > EXACT_TOKENS,
        )
        return self._hidden(inputs[0].long(), step)

    def begin(self, sequence: Sequence, hidden: Tensor) -> Sent:
        """Choose the first new token of a sequence after its prompt's last hidden state [1, h]."""
        row, logits = sequence.row, self.decoder.logits(hidden)
        rows, positions = self.ints([row]), self.ints([sequence.length - 1])
        self.choose_tokens(logits, rows, positions, self._firsts[row : row + 1])
        return self.sent([sequence])

    def decode(self, sequences: list[Sequence]) -> Sent:
        """Send one token of every sequence through the layers and choose the next ones."""
        reach = self._prepare(sequences)
        if self.on_gpu:
            M = width_for(len(sequences))
            self._run((M, reach, self.sampler.shape), M, lambda: self._decode(M, reach))
        else:
            self._decode(len(sequences), reach, step_spans(sequences))
        return self.sent(sequences)

    def forward(self, sequences: list[Sequence]) -> None:
        """The first half of `decode`: up to the logits, for `choose`."""
        reach = self._prepare(sequences)
        if self.on_gpu:
            M = width_for(len(sequences))
            self.make_room_to_keep()
            self._run((M, reach), M, lambda: self._forward(M, reach))
        else:
            self._forward(len(sequences), reach, step_spans(sequences))

    def choose(self, sequences: list[Sequence]) -> Sent:
        """The second half of `decode`, for sequences that count the token sent already."""
        if self.on_gpu:
            M = width_for(len(sequences))
            self._run((M, self.sampler.shape), M, lambda: self._choose_next(M))
        else:
            self._choose_next(len(sequences))
        return self.sent(sequences)

    def read(self, sent: Sent) -> list[list[int]]:
        """The next tokens of each sequence of a step, see `chosen_tokens`; waits for it."""
        if sent.done is not None:
            sent.done.synchronize()
        return chosen_tokens(sent, self._places)

    def log_probabilities(self, sequence: Sequence, position: int) -> TokenLogProbabilities:
        """Those of the token at a position that has been read."""
        top = sequence.request.sampling.logprobs or 0
        at = (position % PLACES, sequence.row, slice(1 + top))
        values = self._log_probabilities.values[at].tolist()
        ids = self._log_probabilities.ids[at].tolist()
        return TokenLogProbabilities(values[0], tuple(zip(ids[1:], values[1:], strict=True)))

    def _prepare(self, sequences: list[Sequence]) -> int:
        """Put the inputs of a step in place; returns its reach."""
        if sequences != self.batch:
            self._compose(sequences)
        return reach_for(max(each.length for each in sequences) + 1, self.context)

    def _decode(self, M: int, reach: int, spans: tuple[Span, ...] = ()) -> None:
        inputs = self.inputs[:, :M]
        logits = self._logits_of(M, reach, spans)
        self.choose_tokens(logits, inputs[ROWS], inputs[POSITIONS], self.ids[:M])

    def _forward(self, M: int, reach: int, spans: tuple[Span, ...] = ()) -> None:
        self.keep(self._logits_of(M, reach, spans))

    def _choose_next(self, M: int) -> None:
        inputs = self.inputs[:, :M]
        self.choose_tokens(self.kept(M), inputs[ROWS], inputs[POSITIONS], self.ids[:M])

    def make_room_to_keep(self) -> None:
        """Make the tensor that keeps logits on a GPU, before half a step is recorded."""
        if not len(self._kept):
            widest = max(len(self.ids), EXACT_TOKENS)
            shape = widest, _aligned(self.sampler.vocabulary, self.decoder)
            self._kept = torch.empty(shape, dtype=torch.float32, device=self.ids.device)

    def keep(self, logits: Tensor) -> None:
        """Keep logits [M, V or more] of the first half of a step for the second."""
        if self.on_gpu:
            self._kept[: len(logits)].copy_(logits[:, : self._kept.shape[1]])
        else:
            self._kept = logits

    def kept(self, M: int) -> Tensor:
        """Logits of the first half of a step of M tokens."""
        return self._kept[:M]

    def _logits_of(self, M: int, reach: int, spans: tuple[Span, ...]) -> Tensor:
        """Logits after a token of each sequence: [M, V or more]."""
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
        """Logits after every token of a step that decodes: [M, V or more]."""
        hidden = self._hidden(ids, step)
        if self.trail is not None:
            self.decoder.ops.leave_rows(hidden, step.rows, step.positions, self.trail)
        return self.decoder.logits(hidden)

    def _hidden(self, ids: Tensor, step: Step) -> Tensor:
        """Run tokens through the layers, and let the drafter read them: [M, h]."""
        if self.blocks is None:
            return self.decoder.hidden(ids, self.state, step)
        taps = self.blocks.taps(len(ids))
        hidden = self.decoder.hidden(ids, self.state, step, taps)
        self.blocks.read(taps, step)
        return hidden

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
        ops.choose(logits, self.sampler, rows, positions, token, self._places, masks)
        if self.sampler.shape.logprobs:
            ops.log_probabilities(
                logits,
                self.sampler.vocabulary,
                rows,
                positions,
                token,
                self._log_probabilities,
            )

    def _run(self, key: Hashable, M: int, step: Callable[[], None]) -> None:
        """Run a recorded part of a step of M sequences."""
        self.graphs.run(key, step, (self.ids[:M], self.inputs[:, :M]))

    def _compose(self, sequences: list[Sequence]) -> None:
        """Put the inputs of other sequences than last time in place."""
        self.leave_rounds(sequences)
        before = {id(each): index for index, each in enumerate(self.batch)}
        tokens = torch.cat((self.ids[: len(before)], self._firsts))
        rows = [each.row for each in sequences]
        origins = [before.get(id(each), len(before) + each.row) for each in sequences]
        inputs = self.ints([[each.length for each in sequences], rows, rows, rows, origins])
        self.inputs.fill_(SCRATCH)  # so that tokens beyond these belong to nobody
        self.inputs[:, : len(rows)] = inputs[:4]
        self.ids[: len(rows)] = tokens[inputs[4].long()]
        self.batch = list(sequences)

    def leave_rounds(self, sequences: list[Sequence]) -> None:
        """Leave tokens and states of sequences from a round where a step without drafts looks."""
        late = [each for each in sequences if each.verified]
        for each in late:
            if each.slot != each.row:
                self.state.slots.copy(each.slot, each.row)
                each.slot = each.row
            each.verified = False
        if late:
            rows, tokens = self.ints([[e.row, e.output[-1]] for e in late]).long().T
            self._firsts[rows] = tokens

    def ints(self, values: object) -> Tensor:
        """Copy numbers to the device as int32; see `to_device`."""
        return to_device(values, torch.int32, self.state.device)

    def sent(
        self,
        sequences: list[Sequence],
        drafts: Numbers[Numbers[int]] = (),
        flight: Flight | None = None,
    ) -> Sent:
        """What has been sent, for `read`."""
        done = torch.cuda.Event() if self.on_gpu else None  # type: ignore[no-untyped-call]
        if done is not None:
            done.record()
        return Sent(list(sequences), drafts, done, flight)


def _aligned(vocabulary: int, decoder: Decoder) -> int:
    """Logits of a row to keep, so that every row is aligned."""
    return min(-(-vocabulary // ALIGNED) * ALIGNED, decoder.config.vocab_size)
