"""Runs a decoder over one sequence: prefill in chunks, then one token a step.

On a GPU a step is one CUDA graph (embedding to sampled token, position advanced on the device)
and the host reads tokens one step late, so the device never waits for it. On a CPU the same step
runs directly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.formats.errors import CheckpointError, RequestError
from lowbit.runtime.engine.graphs import aside, recorded
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.cache import KVCache
from lowbit.runtime.state.sampling import Sampler, SamplingParams, sample

PREFILL_CHUNK = 1024


@dataclass(slots=True)
class Engine:
    """A decoder with the cache, the sampler and the history of its one sequence.

    Attributes:
        held: ids that the cache holds (and at most one more); the next prompt reuses what it
            shares with them, as far as the cache can go back.
        token: [1] int64 on the device, the input of the next step.
        seed: of the random numbers of the last request.
        reused: tokens of the last prompt that were in the cache already.
    """

    decoder: Decoder
    cache: KVCache
    sampler: Sampler
    token: Tensor
    held: list[int] = field(default_factory=list)
    seed: int = 0
    reused: int = 0
    _rewinds: int = 0
    _prompt_length: int = 0  # of the prompt that `held` begins with; 0 after anything else
    _running: bool = False  # stays set where a change of the cache was interrupted halfway
    _graphs: "dict[int, torch.cuda.CUDAGraph]" = field(default_factory=dict)  # by the cache's reach
    _graph_shape: tuple[bool, int, bool] | None = None
    _slots: Tensor = field(init=False)  # [2] int64 on the host, where steps leave their tokens

    def __post_init__(self) -> None:
        """Make room for the last two tokens on their way to the host."""
        self._slots = torch.zeros(2, dtype=torch.int64, pin_memory=self.token.is_cuda)

    @property
    def on_gpu(self) -> bool:
        """True if steps run as CUDA graphs."""
        return self.token.is_cuda

    def room(self, prompt: int) -> int:
        """New tokens that fit after a prompt of so many; the last one needs no row."""
        return self.cache.context - prompt + 1

    def logits(self, ids: Sequence[int], start: int = 0) -> Tensor:
        """Logits after every token from `start` on: [T - start, V] float32, on the device.

        Tokens before `start` that the cache holds already are not run again.

        Raises:
            RequestError: empty, longer than the context, an id outside the vocabulary, or a start
                that is no token's.
        """
        self.check(ids)
        if not 0 <= start < len(ids):
            raise RequestError(f"the sequence has {len(ids)} tokens, none is number {start}")
        if self._running:
            self.forget()
        self._rewind(self.cache.reusable(min(_common_prefix(self.held, ids), start)))
        if self.cache.recurrent and start > self.cache.length:
            for _ in self._forward(ids[self.cache.length : start]):
                pass
            self.cache.save()
        skipped = start - self.cache.length
        chunks = []
        for hidden in self._forward(ids[self.cache.length :]):
            if skipped < len(hidden):
                chunks.append(self.decoder.logits(hidden[skipped:]))
            skipped = max(0, skipped - len(hidden))
        return torch.cat(chunks)

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, count: int, kept: int | None = None
    ) -> Iterator[int]:
        """Up to `count` new tokens, one at a time; the caller stops when it has seen enough.

        Args:
            prompt: token ids.
            params: how tokens are chosen.
            count: at least 1.
            kept: how many tokens of the prompt the next one is likely to begin with, for models
                that cannot go back to any; None for all but the last.

        Raises:
            RequestError: an empty prompt, one longer than the context, or an id outside the
                vocabulary; also where another request began before this one had ended.
            CheckpointError: the logits after some token are NaN or infinite.
        """
        self.check(prompt)
        count = min(count, self.room(len(prompt)))
        if self._running:
            self.forget()
        shared = self.cache.reusable(_common_prefix(self.held, prompt))
        # A prompt that is held whole has been asked before. Prefill and decode round differently,
        # so only the same steps again give the same bytes, and those of last time are known.
        if shared == len(prompt):
            repeated = self._prompt_length == len(prompt) and not self.cache.recurrent
            shared = self.reused if repeated else 0
        self.reused = shared
        self._rewind(self.reused)
        self._prompt_length = len(prompt)
        self.sampler.configure(params)  # the step that `_capture` runs divides by the temperature
        if self._graph_shape != self.sampler.shape:
            self._graphs.clear()
            self._graph_shape = self.sampler.shape
        self.seed = self.sampler.start(params, prompt, count)
        kept = len(prompt) - 1 if kept is None else min(kept, len(prompt) - 1)
        if self.cache.recurrent and kept > self.reused:
            for _ in self._forward(prompt[self.reused : kept]):
                pass
            self.cache.save()
        hidden = None
        for hidden in self._forward(prompt[self.cache.length :]):  # noqa: B007 - the last is used
            pass
        if hidden is not None and count > 0:
            self.token.copy_(sample(self.decoder.logits(hidden[-1:]), self.sampler))
            yield from self._decode(count)

    def _decode(self, count: int) -> Iterator[int]:
        """Read token after token; on a GPU the step after is already under way."""
        sent = _events(self.on_gpu)
        ahead = 1 if self.on_gpu else 0
        first = self.cache.length
        self.decoder.ops.post(self.token, self.sampler.nonfinite, self.cache.position, self._slots)
        _record(sent, first)
        launched = 1
        rewinds = self._rewinds
        for index in range(count):
            if self._rewinds != rewinds:
                raise RequestError(
                    "another request has taken this one's place in the cache",
                    hint="iterate a stream to its end, or close it, before the next one",
                )
            while launched < min(count, index + 1 + ahead):
                self._launch()
                _record(sent, first + launched)
                launched += 1
            token = self._read(sent, first + index)
            if token < 0:
                self.forget()  # keys, values and states may hold NaN
                raise nonfinite_error(first + index)
            self.held.append(token)
            yield token

    def _read(self, sent: "Sequence[torch.cuda.Event]", position: int) -> int:
        """The token chosen at a position, one of the last two; -1 after logits with NaN."""
        if sent:
            sent[position % 2].synchronize()
        return int(self._slots[position % 2])

    def _launch(self) -> None:
        """Run one step: `token` is appended to the cache and replaced by the next one."""
        self._running = True
        self.cache.reach = self.cache.reach_for(self.cache.length + 1)
        if self.on_gpu:
            if self.cache.reach not in self._graphs:
                self._capture()
            self._graphs[self.cache.reach].replay()
        else:
            self._step()
        self.cache.length += 1
        self._running = False

    def _step(self) -> None:
        hidden = self.decoder.hidden(self.token, self.cache)
        logits = self.decoder.logits(hidden)
        self.decoder.ops.advance(logits, self.sampler, self.token, self.cache.position, self._slots)

    def _capture(self) -> None:
        """Record a step of the cache's reach as a graph.

        A step is run first; the row it writes lies beyond what the cache holds, and whatever else
        it changes is set again.
        """
        with aside():
            before = self.cache.delta.clone()
            sampler, token = self.sampler.snapshot(), self.token.clone()
            self._step()  # compiles kernels, which cannot happen during the capture
            self.cache.position.fill_(self.cache.length)
            self.cache.delta.copy_(before)
            self.sampler.restore(sampler)
            self.token.copy_(token)
        self._graphs[self.cache.reach] = recorded(self._step, self._graphs)

    def _forward(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """Append ids to the cache in chunks; yields the hidden states [M, h] of each."""
        tokens = torch.tensor(ids, dtype=torch.int64, device=self.token.device)
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = slice(start, start + PREFILL_CHUNK)
            self._running = True
            self.cache.reach = self.cache.reach_for(self.cache.length + len(ids[chunk]))
            hidden = self.decoder.hidden(tokens[chunk], self.cache)
            self.held.extend(ids[chunk])
            self.cache.advance(len(tokens[chunk]))
            self._running = False
            yield hidden

    def _rewind(self, length: int) -> None:
        self._rewinds += 1
        self._prompt_length = 0
        self._running = True
        self.cache.truncate(length)
        del self.held[length:]
        self._running = False

    def forget(self) -> None:
        """Drop what the cache holds."""
        self._rewind(0)

    def advice(self, tokens: int, before: str = "") -> str:
        """Words that ask for a larger context, empty where the model has too few positions.

        Args:
            tokens: the context that is needed.
            before: the words.
        """
        possible = tokens <= self.decoder.config.max_position_embeddings
        return f"{before}ask for a larger --context" if possible else ""

    def check(self, ids: Sequence[int]) -> None:
        """Refuse a prompt that cannot be run.

        Raises:
            RequestError: empty, longer than the context, or an id outside the vocabulary.
        """
        if not ids:
            raise RequestError("the prompt is empty", hint="give at least one token")
        if len(ids) > self.cache.context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, the context is {self.cache.context}",
                hint=f"shorten the prompt{self.advice(len(ids), ', or ')}",
            )
        rows = self.decoder.config.vocab_size
        if not all(0 <= id < rows for id in ids):
            raise RequestError(f"token ids must be between 0 and {rows - 1}")


def nonfinite_error(tokens: int) -> CheckpointError:
    """The error of a sequence whose logits after `tokens` tokens are NaN or infinite."""
    return CheckpointError(
        f"the logits after {tokens} tokens are NaN or infinite, so no token can be chosen",
        hint="some activation overflows: look for damaged weights with `lowbit-convert verify "
        "MODEL` and `lowbit-convert report MODEL`, or convert the original again",
    )


def _events(on_gpu: bool) -> "tuple[torch.cuda.Event, ...]":
    """Marks behind the last two steps; none where steps run at once."""
    return (torch.cuda.Event(), torch.cuda.Event()) if on_gpu else ()  # type: ignore[no-untyped-call]


def _record(sent: "Sequence[torch.cuda.Event]", position: int) -> None:
    """Mark the step that chose the token at a position."""
    if sent:
        sent[position % 2].record()


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading ids that two sequences share."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))
