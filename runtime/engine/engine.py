"""Runs requests together: a step takes a chunk of a prompt and a token of every other sequence.

The engine has no thread: whoever waits for a token runs steps for everybody until it is there. One
request alone is then never handed from thread to thread, and requests from several threads or
tasks still share their steps.
"""

import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from threading import Lock, RLock

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError, QueueFullError, RequestError
from lowbit.formats.machine.system import explained
from lowbit.runtime.engine.cuts import CHUNK, next_cut, snapshot_due
from lowbit.runtime.engine.drafting import Drafting
from lowbit.runtime.engine.handle import Handle
from lowbit.runtime.engine.new_tokens import new_tokens, tokens_of_round
from lowbit.runtime.engine.prefix import Reuse
from lowbit.runtime.engine.request import CheckedRequest, Limits, TokenRequest
from lowbit.runtime.engine.restrict import (
    Failed,
    first_unbound,
    foresee,
    restrict,
    restrict_round,
)
from lowbit.runtime.engine.room import Room
from lowbit.runtime.engine.rounds import Part
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.scores import score_chunk
from lowbit.runtime.engine.sent import Sent
from lowbit.runtime.engine.sequence import Finish, Sequence
from lowbit.runtime.engine.take import take_token
from lowbit.runtime.engine.threads import StepThreads
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.pages import EXTRA
from lowbit.runtime.state.sampling import SamplingParams, random_seed


class Engine:
    """Requests on one model.

    Attributes:
        runner: sends steps to the device.
        limits: sizes that requests must fit.
        drafting: proposes tokens that a step checks together; None where nobody does.
        most_waiting: requests beside those that run together; None for any number.
        reuse: counts the prompts that began with tokens in the cache.
        threads: chooses the CPU threads of decode steps; None runs them on all that torch has, as
            a GPU does.
        in_prompt: a chunk of a prompt is in the layers, which takes minutes on a slow CPU.
    """

    def __init__(
        self, runner: Runner, most_waiting: int | None = None, drafting: Drafting | None = None
    ) -> None:
        """Nothing has been asked yet."""
        self.runner, self.most_waiting = runner, most_waiting
        self.drafting = drafting
        self.limits = Limits(
            context=runner.context,
            positions=runner.decoder.config.max_position_embeddings,
            embedded=runner.decoder.config.vocab_size,
            vocabulary=runner.sampler.vocabulary,
            pages=runner.state.pages.count - EXTRA,
        )
        self._lock = RLock()
        self._room = Room(runner)
        self.reuse = Reuse()
        self.threads = None if runner.on_gpu else StepThreads()
        self.in_prompt = False
        self._arriving = Lock()  # never held for longer than it takes to count
        self._arrived: deque[Sequence] = deque()  # since the last step
        self._waiting: deque[Sequence] = deque()
        self._prompt: Sequence | None = None  # whose prompt is being run
        self._decoding: list[Sequence] = []
        self._sent: deque[Sent] = deque()
        self._stepping = False  # stays set where a step was interrupted halfway

    def submit(self, request: TokenRequest | CheckedRequest) -> Handle:
        """Take up a request, without waiting for the step under way; its handle gives the tokens.

        Raises:
            RequestError: one that has not been checked and does not fit, see `Limits.check`.
            LowbitError: its constraint failed.
            QueueFullError: as many wait as may.
        """
        checked = request if isinstance(request, CheckedRequest) else self.limits.check(request)
        seed, constraint = checked.request.sampling.seed, checked.request.constraint
        sequence = Sequence(
            request=checked.request,
            count=checked.count,
            seed=random_seed() if seed is None else seed,
            unbound=first_unbound(constraint),
        )
        with self._arriving:
            self._check_queue()
            self._arrived.append(sequence)
        return Handle(self, sequence)

    def _check_queue(self) -> None:
        """Refuse a request where as many wait as may.

        Raises:
            QueueFullError: see `submit`.
        """
        asked = {*self.waiting, *self.running}  # a step may move one from these to those
        ahead = sum(not each.cancelled for each in asked)  # the next step ends the others
        if self.most_waiting is not None and ahead >= self.rows + self.most_waiting:
            raise QueueFullError(
                f"{ahead} requests run or wait, and no more than {self.rows} run together",
                hint="ask again later",
            )

    def generate(self, prompt: Ids[int], params: SamplingParams, count: int) -> Handle:
        """Up to `count` new tokens after a prompt, whatever they are; see `submit`."""
        return self.submit(TokenRequest(tuple(prompt), params, count))

    def next_token(self, sequence: Sequence) -> int | None:
        """The next token of a sequence, or None where it has ended; runs steps for all meanwhile.

        Raises:
            LowbitError: that ended it.
        """
        while (token := sequence.take()) is None:
            if not self.advance(sequence):
                return None
        return token

    def advance(self, sequence: Sequence) -> bool:
        """Run a step for all unless a token of the sequence is there; False where it has ended.

        Raises:
            LowbitError: that ended it.
        """
        with self._lock:
            if sequence.unread:
                return True
            if sequence.error is not None:
                raise sequence.error
            if sequence.ended:
                return False
            if not self.step() and not sequence.ended:
                raise RequestError("the request waits for room that nobody will give back")
            return True

    def step(self) -> bool:
        """Send one step to the device and read the one before.

        A step that raises ends the requests that ran in it; those that wait go on with the next.

        Returns:
            False if there was nothing to do.
        """
        with self._lock:
            try:
                return self._step()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # those of libraries in Rust are no Exceptions
                self._fail(error)
                raise

    def _step(self) -> bool:
        self._begin()
        # A CPU runs steps at once: a first token would wait there for the second one.
        ready = self._decoding if self.runner.on_gpu else list(self._decoding)
        running, sent = bool(self._decoding), len(self._sent)
        budget = CHUNK
        while budget > 0 and (sequence := self._next_prompt()) is not None:
            budget -= self._run_chunk(sequence)
        # First tokens are read a step later, so that running sequences do not wait for a prompt.
        begun = len(self._sent) - sent if running else 0
        decoding = [each for each in ready if each.chosen < each.count]
        started = time.perf_counter()
        with self._step_threads():
            plain = bool(decoding) and self._decode(decoding)
            worked = bool(decoding) or bool(self._sent) or budget < CHUNK
            self._read(1 + begun if decoding and self.runner.on_gpu else 0)
        seconds = time.perf_counter() - started
        if self.threads is not None and decoding:
            self.threads.note((len(decoding), plain), seconds)
        if self.drafting is not None and plain and budget == CHUNK and sent < 2:
            self.drafting.costs.note_step(len(decoding), seconds)
        self._stepping = False
        return worked

    @contextmanager
    def _step_threads(self) -> Iterator[None]:
        """Run what is inside on as many threads as are fastest for steps, of those torch has."""
        if self.threads is None:
            yield
            return
        most = torch.get_num_threads()
        torch.set_num_threads(self.threads.choose(most))
        try:
            yield
        finally:
            torch.set_num_threads(most)

    def logits(self, ids: Ids[int], start: int = 0) -> Tensor:
        """Logits after every token from `start` on: [T - start, V] float32, on the device.

        Tokens before `start` that the cache holds are not run again.

        Raises:
            RequestError: empty, longer than the context, an id outside the vocabulary, a start
                that is no token's, or other requests leave no room.
        """
        self.limits.check_prompt(ids, start)
        sequence = Sequence(TokenRequest(tuple(ids)), count=1, seed=0)
        with self._lock:
            self._begin()
            while not self._room.open(sequence, scored=start):
                self._stepping = False
                if not self.step():
                    raise RequestError("other requests leave no room for this one")
                self._begin()
            parts = []
            try:
                while sequence.length < len(ids):
                    first = sequence.length
                    hidden = self._send_chunk(sequence)
                    if first + len(hidden) > start:
                        parts.append(self.decoder.logits(hidden[max(0, start - first) :]))
            except Exception:  # such as too little memory: only this call ends
                self._end(sequence)
                self._stepping = False
                raise
            self._end(sequence)
            self._stepping = False
        return torch.cat(parts)

    @property
    def decoder(self) -> Decoder:
        """The model."""
        return self.runner.decoder

    @property
    def rows(self) -> int:
        """Sequences that can be decoded together."""
        return self.runner.tables.shape[0] - 1

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that have room now."""
        prompt = self._prompt
        return tuple(self._decoding) if prompt is None else (*self._decoding, prompt)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that have no room yet."""
        return (*list(self._arrived), *list(self._waiting))

    @property
    def free_pages(self) -> int:
        """Pages that neither a sequence nor a prefix holds."""
        return self._room.pages.free

    @cached_property
    def driver(self) -> ThreadPoolExecutor:
        """The thread that runs steps while tasks wait."""
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="lowbit-engine")

    def forget(self) -> None:
        """Drop what the cache holds of ended requests."""
        with self._lock:
            self._begin()
            self._room.forget()
            self._stepping = False

    def _begin(self) -> None:
        """Recover from an interrupted step, queue what has arrived, end what was cancelled."""
        if self._stepping:
            self._recover()
        self._stepping = True  # stays where what follows is interrupted
        while self._arrived:  # here and below, who was interrupted is in both, never in neither
            if self._arrived[0] not in self._waiting:
                self._waiting.append(self._arrived[0])
            self._arrived.popleft()
        for sequence in (*self._waiting, *self._decoding, self._prompt):
            if sequence is not None and sequence.cancelled:
                self._end(sequence, finish="cancelled")

    def _next_prompt(self) -> Sequence | None:
        """The sequence whose prompt is run next, once it has a row and pages."""
        if self._prompt is None and self._waiting:
            first = self._waiting[0]
            scored = None if first.request.prompt_logprobs is None else 0
            try:
                opened = self._room.open(first, scored)
            except Exception:  # the first in the queue ends with the step, or it fails for ever
                self._prompt = self._waiting.popleft()
                raise
            if opened:
                self._prompt = first
                self._waiting.popleft()
                self.reuse.count(first.reused)
        return self._prompt

    def _run_chunk(self, sequence: Sequence) -> int:
        """Send the next chunk of a prompt, and choose the first token after the last one."""
        first = sequence.length
        hidden = self._send_chunk(sequence)
        if self.drafting is not None and sequence.count > 0:
            self.drafting.read_prompt(sequence, first, hidden)
        if sequence.request.prompt_logprobs is not None:
            score_chunk(sequence, first, hidden, self.decoder)
        if sequence.length == len(sequence.request.prompt):
            self._room.keep(
                sequence, max((c for c in sequence.cuts if c <= sequence.length), default=0)
            )
            if sequence.request.constraint is not None:
                self._restrict([sequence])
                self._foresee([sequence])
            if sequence.ended:
                return len(hidden)
            if self.drafting is not None:
                self.drafting.begin(sequence)
            self._sent.append(self.runner.begin(sequence, hidden[-1:]))
            sequence.chosen = 1
            sequence.phase = "decoding"
            self._decoding.append(sequence)
            self._prompt = None
        return len(hidden)

    def _decode(self, sequences: list[Sequence]) -> bool:
        """Send one token of every sequence through the layers and choose the next ones.

        The mask of a token depends on the one before it. Where one is needed, the host reads all
        that are under way and makes it while the layers run. False if there were drafts too.
        """
        drafting = self.drafting
        if drafting is not None and self._by_head(sequences, drafting):
            return False
        if any(sent.flight for sent in self._sent):  # its tokens and states come first
            self._read()
        sequences = [each for each in sequences if not each.ended]
        if drafting is not None and (not self._sent or drafting.worth_reading(sequences)):
            self._read()  # drafts follow the last token
            self._foresee(sequences)
            sequences = [each for each in sequences if not each.ended]
            parts = drafting.round(sequences)
            if parts:
                chosen = drafting.check(parts, self._restrict_round)
                for sequence, token in tokens_of_round(parts, chosen):
                    self._take(sequence, token)
                return False
        if not sequences:
            return False
        bound = [each for each in sequences if each.bound]
        if bound:
            self.runner.forward(sequences)
        else:
            self._sent.append(self.runner.decode(sequences))
        for each in sequences:
            each.length, each.chosen = each.length + 1, each.chosen + 1
        if bound:
            self._read()
            self._restrict(bound)
            if not all(each.ended for each in sequences):
                self._sent.append(self.runner.choose(sequences))
            self._foresee(bound)
        return True

    def _by_head(self, sequences: list[Sequence], drafting: Drafting) -> bool:
        """Send a round whose drafts the model's head makes; False where other steps are better."""
        drafts = drafting.by_head(sequences)
        sent = drafting.send(sequences, drafts) if drafts else None
        if drafts and sent is None:
            self._read()
            sequences = [each for each in sequences if not each.ended]
            drafts = drafting.by_head(sequences)
            sent = drafting.begin_rounds(sequences, drafts) if drafts else None
        if sent is not None:
            self._sent.append(sent)
        return sent is not None

    def _restrict(self, sequences: list[Sequence]) -> None:
        """Set the masks of constrained sequences; one whose constraint fails is ended."""
        self._end_failed(restrict(sequences, self.runner.sampler))

    def _restrict_round(self, parts: list[Part]) -> list[tuple[int, ...]]:
        """The same for every token of a round: its drafts that can be checked."""
        failed, drafts = restrict_round(parts, self.runner.sampler)
        self._end_failed(failed)
        return drafts

    def _foresee(self, sequences: list[Sequence]) -> None:
        """Find the tokens that constraints force next, where somebody drafts."""
        if self.drafting is not None:
            self._end_failed(foresee(sequences, self.drafting.most + 1))

    def _end_failed(self, failed: Failed) -> None:
        for each, error in failed:
            self._end(each, error)

    def _send_chunk(self, sequence: Sequence) -> Tensor:
        """Send the tokens up to the next cut through the layers: their hidden states."""
        stop = next_cut(sequence.cuts, sequence.length, len(sequence.request.prompt))
        self.in_prompt = True
        try:
            hidden = self.runner.chunk(sequence, sequence.request.prompt[sequence.length : stop])
        finally:
            self.in_prompt = False
        sequence.length = stop
        if stop in sequence.cuts and snapshot_due(stop, sequence.snapshots, sequence.reused):
            self._room.take_snapshot(sequence)
        return hidden

    def _read(self, ahead: int = 0) -> None:
        """Hand out the tokens of all steps but the last `ahead` ones."""
        while len(self._sent) > ahead:
            sent = self._sent.popleft()
            for sequence, token in new_tokens(sent, self.runner):
                self._take(sequence, token)
            if self.drafting is not None:
                self.drafting.take_down(sent)

    def _take(self, sequence: Sequence, token: int) -> None:
        """Hand out the next token of a sequence."""
        end = take_token(sequence, token, self.runner)
        if isinstance(end, LowbitError):
            self._end(sequence, end)
        elif end is not None:
            self._end(sequence, finish=end)

    def _end(
        self,
        sequence: Sequence,
        error: LowbitError | None = None,
        finish: Finish | None = None,
    ) -> None:
        """End a sequence, in whatever phase; without an error its tokens stay in the cache."""
        phase, sequence.error, sequence.finish = sequence.phase, error, finish
        sequence.phase = "ended"  # last, since handles look without the lock
        if phase == "waiting":
            self._waiting.remove(sequence)
            return
        if error is None:
            if phase == "decoding":
                self._room.take_snapshot(sequence)
            self._room.keep(sequence, sequence.length)
        self._room.close(sequence)
        if sequence in self._decoding:
            self._decoding.remove(sequence)
        if self._prompt is sequence:
            self._prompt = None

    def _fail(self, error: BaseException) -> None:
        """End the requests of a step that raised; all, where nothing can be begun anew."""
        found = explained(error) or LowbitError(
            f"a step of the engine failed: {type(error).__name__}"
        )
        try:
            self._recover(found)
        except Exception:
            for queue in (self._waiting, self._arrived):
                while queue:
                    queue.popleft().lose(found)
            raise

    def _recover(self, error: LowbitError | None = None) -> None:
        """Begin anew after a step that failed, or was interrupted: its sequences are lost."""
        for sequence in (*self._decoding, self._prompt):
            if sequence is not None and not sequence.ended and sequence not in self._waiting:
                sequence.lose(error)
        for sequence in self._waiting:  # the first may have been given a row
            sequence.phase = "waiting"
        self._prompt = None
        self._decoding.clear()
        self._sent.clear()
        if self.runner.on_gpu:
            torch.cuda.synchronize()
        self._room = Room(self.runner)
        self._stepping = False
