"""The engine: every step takes chunks of prompts and a token of each sequence behind its prompt.

Whoever waits for a token lets the owner of the steps (`StepOwner`) run them for everybody.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import RLock
from typing import Literal

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.formats.machine.system import explained
from lowbit.runtime.backends.step_threads import StepThreads
from lowbit.runtime.engine.constraints import free_tokens_of, restrict
from lowbit.runtime.engine.draft_source import DraftSource
from lowbit.runtime.engine.early_reads import EarlyReads
from lowbit.runtime.engine.packs import Chunk, PackLimits, fill_pack
from lowbit.runtime.engine.prompt_images import PromptImages, images_of
from lowbit.runtime.engine.request import Request, limits_of
from lowbit.runtime.engine.results import PendingStep
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.scheduler import Scheduler
from lowbit.runtime.engine.scoring import score_chunk
from lowbit.runtime.engine.sequence import Ended, Sequence
from lowbit.runtime.engine.span import ImageSpan
from lowbit.runtime.engine.step_owner import StepOwner
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.changes import PrepareSnapshot
from lowbit.runtime.state.sampling_params import SamplingParams, random_seed

IMAGES_TURN_S = 0.02  # of waiting for images where nothing else is to be done
CPU_TURN_S = 0.1  # of prompts in a step on a CPU beside sequences that decode; then a layer ends
Made = Literal["made", "paused", "failed"]  # what became of a chunk's embeddings


class Engine:
    """Runs the requests to one model.

    Attributes:
        runner: sends steps to the device.
        scheduler: says which sequences a step takes.
        limits: sizes that requests must fit.
        drafting: proposes drafts; None without speculation.
        threads: chooses the CPU threads of decode steps; None on a GPU, and where the user has
            chosen them.
        in_prompt: true while a chunk of a prompt or the tower for its images runs, which takes
            minutes on a slow CPU.
    """

    def __init__(
        self, runner: Runner, most_waiting: int | None = None, drafting: DraftSource | None = None
    ) -> None:
        """Begin without requests, any number of which may wait where `most_waiting` is None."""
        self.runner, self.drafting = runner, drafting
        self.scheduler = Scheduler(runner.capacity, most_waiting)
        self.limits = limits_of(runner)
        self.threads = None if runner.on_gpu else StepThreads()
        self.in_prompt = False
        self._lock = RLock()  # held while a step runs
        self._owner = StepOwner(self._running)
        self._sent: deque[PendingStep] = deque()
        self._early_reads = EarlyReads()
        self._paused: Chunk | None = None
        self._interrupted = False  # set while a step runs, and after one that was left halfway

    def submit(self, request: Request) -> Handle:
        """Queue a request without waiting for the running step; its handle gives the tokens.

        Raises:
            RequestError: it does not fit, see `Limits.check`.
            LowbitError: its constraint failed.
            QueueFullError: as many wait as may.
        """
        if request.count is None:
            request = self.limits.check(request)
        seed = request.sampling.seed
        sequence = Sequence(
            request=request,
            count=request.count or 0,
            seed=random_seed() if seed is None else seed,
            free_tokens=free_tokens_of(request.constraint),
            images=self._images_of(request),
        )
        self.scheduler.add(sequence)
        return Handle(self, sequence)

    def _images_of(self, request: Request) -> PromptImages | None:
        return images_of(request.images, len(request.prompt), self.limits.hidden)

    def generate(self, prompt: Ids[int], params: SamplingParams, count: int) -> Handle:
        """Up to `count` new tokens after a prompt, whatever they are; see `submit`."""
        return self.submit(Request(tuple(prompt), params, count))

    def next_token(self, sequence: Sequence) -> int | None:
        """Next token of a sequence, None once it has ended; runs steps for all requests meanwhile.

        Raises:
            LowbitError: that ended it.
        """
        while (token := sequence.take()) is None:
            if not self.advance(sequence):
                return None
        return token

    def advance(self, sequence: Sequence) -> bool:
        """Run a step unless a token of the sequence is ready; False once the sequence has ended.

        Raises:
            LowbitError: that ended it.
        """
        return self._owner.run(self._advance, sequence)

    def _advance(self, sequence: Sequence) -> bool:
        with self._lock:
            if sequence.unread:
                return True
            if sequence.error is not None:
                raise sequence.error
            if sequence.ended:
                return False
            if not self._whole_step() and not sequence.ended:
                raise RequestError("the request waits for room that nobody will give back")
            return True

    def step(self) -> bool:
        """Send a step to the device and read the step before it.

        A step that raises ends the requests that ran in it; those that wait go on with the next.

        Returns:
            False if there was nothing to do.
        """
        return self._owner.run(self._whole_step)

    def _whole_step(self) -> bool:
        with self._lock:
            try:
                with self._untraced(), self._working():
                    return self._step()
            except (KeyboardInterrupt, SystemExit):
                raise
            # Any failure, a panic in a Rust library included, which is no Exception, must end the
            # requests of the step, or whoever waits for them would run the same step for ever.
            except BaseException as error:
                self._fail(error)
                raise

    def _step(self) -> bool:
        """Schedule, run, commit; returns False if there was nothing to do."""
        scheduler, on_gpu = self.scheduler, self.runner.on_gpu
        if self._early_reads.take(bool(scheduler.decoding)) and len(self._sent) > 1:
            self._commit(1)
            self._early_reads.note_read()
            return True
        if self._paused is not None and self._paused.sequences[0].ended:
            self._paused = None
        # On a CPU a sequence decodes from the next step on, else its first token would wait.
        ready = scheduler.decoding if on_gpu else list(scheduler.decoding)
        running, under_way = bool(ready), len(self._sent)
        budget = chunk = scheduler.capacity.chunk
        until = time.perf_counter() + CPU_TURN_S if running and not on_gpu else None
        while budget > 0 and (pack := self._next_pack(budget)):
            budget -= self._run_chunk(pack, until)
        # First tokens are read a step later, so that running sequences do not wait for a prompt.
        begun = len(self._sent) - under_way if running else 0
        decoding = [each for each in ready if each.chosen < each.count]
        if not decoding:
            worked = bool(self._sent) or budget < chunk
            worked = worked or scheduler.wait_for_images(IMAGES_TURN_S)
            self._commit()
            if not scheduler.running:
                self.runner.batch = []  # holds sequences that have ended, with their constraints
            return worked
        started = time.perf_counter()
        with nullcontext() if self.threads is None else self.threads.limit():
            plain = self._decode(decoding)
            sent_at = time.perf_counter()
            self._commit(1 + begun if on_gpu else 0)
        if on_gpu and self.drafting is None:
            self._early_reads.note(begun, budget < chunk, sent_at)
        if self.threads is not None:
            self.threads.note((len(decoding), plain), time.perf_counter() - started)
        return True

    def logits(self, ids: Ids[int], start: int = 0, images: tuple[ImageSpan, ...] = ()) -> Tensor:
        """Logits after every token from `start` on: [T - start, V] float32, on the device.

        Tokens before `start` that the cache holds are not run again.

        Raises:
            RequestError: empty, longer than the context, an id outside the vocabulary, images that
                do not fit, a start that is no token's, or other requests leave no room.
        """
        self.limits.check_prompt(ids, start)
        self.limits.check_images(images, len(ids))
        request = Request(tuple(ids), images=images)
        sequence = Sequence(request, count=1, seed=0, images=self._images_of(request))
        return self._owner.run(self._all_logits, sequence, start)

    def _all_logits(self, sequence: Sequence, start: int) -> Tensor:
        with self._lock:
            while True:
                with self._untraced(), self._working():
                    opened = self.scheduler.blocks.open(sequence, scored=start)
                    self._apply_changes()
                    parts = self._logits(sequence, start) if opened else []
                if opened:
                    if self.runner.link is not None:
                        self.runner.results.wait(self.runner.results.record())
                    return torch.cat(parts)  # outside of inference mode: callers may change it
                if not self._whole_step():
                    raise RequestError("other requests leave no room for this one")

    def _logits(self, sequence: Sequence, start: int) -> list[Tensor]:
        """Run a prompt that has been given room, then take the room back; see `logits`."""
        parts = []
        try:
            while sequence.length < len(sequence.request.prompt):
                first = sequence.length
                chunk = self._open_chunk([sequence], last=False)
                self._run_layers(chunk)
                if chunk.stops[0] > start:
                    parts.append(self.runner.logits(chunk.hidden[max(0, start - first) :]))
        except Exception:  # of torch, such as too little memory: give the room back, whatever it is
            self._end([(sequence, "cancelled")])
            self._interrupted = False
            raise
        self._end([(sequence, "cancelled")])
        return parts

    @property
    def decoder(self) -> Decoder:
        """The model."""
        return self.runner.decoder

    def _running(self) -> bool:
        return any(not each.cancelled for each in self.scheduler.running)

    async def advance_later(self, sequence: Sequence) -> bool:
        """Let the engine's own thread `advance` a sequence, without blocking the event loop."""
        return await self._owner.run_later(self._advance, sequence)

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._owner.run(self._forget)

    def _forget(self) -> None:
        with self._lock, self._working():
            self.scheduler.blocks.forget()

    def prepare_memory(self) -> bool:
        """Allocate a piece of the memory that later prompts will need; False if none is lacking."""
        with self._lock:
            if lacks := self.runner.snapshots.lacks_memory:
                self.runner.apply([PrepareSnapshot()])
            return lacks

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Recover from an interrupted step, then admit the requests that have arrived.

        Ctrl-C may come at any time: `_interrupted` stays set if the body does not reach its end.
        """
        if self._interrupted:
            self._recover()
        self._interrupted = True
        self.scheduler.admit()
        self._apply_changes()
        self.scheduler.prepare_images()
        yield
        self._interrupted = False

    def _untraced(self) -> AbstractContextManager[object]:
        """Inference mode on a CPU, where autograd's part of an operation is time of a step."""
        return nullcontext() if self.runner.on_gpu else torch.inference_mode()

    def _run_chunk(self, pack: list[Sequence], until: float | None) -> int:
        """Run the next chunks of prompts; behind the last ones choose the first new tokens.

        Args:
            pack: their sequences, see `fill_pack`.
            until: time after which the chunk pauses between two layers; None for no pause.

        Returns:
            Tokens of the chunks; most of a step where it pauses, since nothing else fits into one.
        """
        firsts = [each.length for each in pack]
        read = self.drafting is not None or pack[0].request.prompt_logprobs is not None
        if self._paused is None:
            made = self._make_embeddings(pack[0], until)
            if made == "failed":
                return 0
            if made == "paused":
                return self.scheduler.capacity.chunk
            self._paused = self._open_chunk(pack, last=not read)
        chunk = self._paused
        if not self._run_layers(chunk, until):
            return self.scheduler.capacity.chunk
        self._paused, hidden = None, chunk.hidden
        counts = [each.length - first for each, first in zip(pack, firsts, strict=True)]
        parts = torch.split(hidden, counts if len(hidden) == sum(counts) else 1)
        for sequence, first, part in zip(pack, firsts, parts, strict=True):
            self._read(sequence, first, part)
        self._begin(pack, parts)
        return sum(counts)

    def _read(self, sequence: Sequence, first: int, hidden: Tensor) -> None:
        """Read hidden states of a part of a prompt, from position `first` on."""
        if self.drafting is not None and sequence.count > 0:
            self.drafting.read_prompt(sequence, first, hidden)
        if sequence.request.prompt_logprobs is not None:
            score_chunk(sequence, first, hidden, self.decoder, self.runner.logits)
        if sequence.images is not None:
            sequence.images.drop(sequence.length)

    def _begin(self, sequences: list[Sequence], hidden: Iterable[Tensor]) -> None:
        """Choose the first new token of those whose prompts have been sent.

        Args:
            hidden: [m, h] of each, the last row that of the last token that has been sent.
        """
        begun = {}
        for sequence, part in zip(sequences, hidden, strict=True):
            if sequence.length == len(sequence.request.prompt):
                self.scheduler.keep_prompt(sequence)
                begun[sequence] = part[-1:]
        restricted = [each for each in begun if each.request.constraint is not None]
        if restricted:
            self._end(restrict(restricted, self.runner.sampler))
            self._compute_forced_tokens(restricted)
        begun = {each: last for each, last in begun.items() if not each.ended}
        if not begun:
            return
        if self.drafting is not None:
            for each in begun:
                self.drafting.begin(each)
        lasts = list(begun.values())
        together = lasts[0] if len(lasts) == 1 else torch.cat(lasts)
        self._sent.append(self.runner.begin(list(begun), together))
        for each in begun:
            self.scheduler.begin_decoding(each)

    def _make_embeddings(self, sequence: Sequence, until: float | None) -> Made:
        """Make embeddings of the next chunk's images; a failure ends the request.

        A token behind the chunk is made as well, which the head for several tokens reads.
        """
        first, images = sequence.length, sequence.images
        if images is None:
            return "made"
        stop = sequence.next_stop
        if until is None and not self.runner.on_gpu:  # so that the request can be cancelled
            until = time.perf_counter() + CPU_TURN_S
        self.in_prompt = True
        try:
            beside = bool(self.scheduler.decoding)
            return "made" if images.make(first, stop + 1 - first, until, beside) else "paused"
        except Exception as error:  # of whoever gives the images: no other request has a part in it
            found = explained(error)
            if found is None:
                raise
            self._end([(sequence, found)])
            return "failed"
        finally:
            self.in_prompt = False

    def _open_chunk(self, pack: list[Sequence], last: bool) -> Chunk:
        return Chunk(pack, [each.next_stop for each in pack], self.runner.chunk(pack, last))

    def _run_layers(self, chunk: Chunk, until: float | None = None) -> bool:
        """Run the layers of a chunk; False if it pauses, see `_run_chunk`."""
        self.in_prompt = True
        try:
            for hidden in chunk.layers:
                chunk.hidden = hidden
                if until is not None and time.perf_counter() > until:
                    return False
        finally:
            self.in_prompt = False
        for sequence, stop in zip(chunk.sequences, chunk.stops, strict=True):
            self.scheduler.blocks.count_chunk(sequence, stop)
        self._apply_changes()
        return True

    def _decode(self, sequences: list[Sequence]) -> bool:
        """Send a step of the sequences; False if it checks drafts.

        The mask of a token depends on the token before it. If one is needed, the layers run first;
        meanwhile the host reads all steps under way and computes the mask.
        """
        runner = self.runner
        if self.drafting is not None:
            sequences = self._choose(sequences, self.drafting)
            if not sequences:
                return False
        restricted = [each for each in sequences if each.needs_mask]
        if not restricted:
            self._sent.append(runner.decode(sequences))
            return True
        runner.forward(sequences)
        self._commit()
        self._end(restrict(restricted, runner.sampler))
        if not all(each.ended for each in sequences):
            self._sent.append(runner.choose(sequences))
        self._compute_forced_tokens(restricted)
        return True

    def _choose(self, sequences: list[Sequence], drafting: DraftSource) -> list[Sequence]:
        """Send a round with drafts where one pays; returns the sequences that take a plain step."""
        while sequences:
            if not self._sent:
                self._compute_forced_tokens(sequences)
                sequences = [each for each in sequences if not each.ended]
            choice = drafting.choose(sequences, self._sent) if sequences else "plain"
            if choice == "plain":
                return sequences
            if choice == "read":
                self._commit()
                sequences = [each for each in sequences if not each.ended]
                continue
            choice.run()
            self._sent.append(choice)
            if not choice.ahead:
                self._commit()
            return []
        return []

    def _compute_forced_tokens(self, sequences: list[Sequence]) -> None:
        """Ask constraints for the tokens that they force next, if drafts are made."""
        if self.drafting is not None:
            self._end(self.drafting.compute_forced_tokens(sequences))

    def _commit(self, ahead: int = 0) -> None:
        """Wait for all steps but the last `ahead` ones, and append their tokens."""
        while len(self._sent) > ahead:
            step = self._sent.popleft()
            self._end(step.commit() if self.drafting is None else self.drafting.commit(step))

    def _end(self, ended: Ended) -> None:
        for sequence, why in ended:
            self.scheduler.end(sequence, why)
        self._apply_changes()

    def _next_pack(self, budget: int) -> list[Sequence]:
        """Sequences whose next chunks run together, most often one; none if no prompt runs.

        Args:
            budget: tokens that the step may still take; the first chunk of all is taken anyway.
        """
        first = self._next_prompt()
        if first is None or first.next_count > self.runner.pack_tokens:
            return [] if first is None else [first]
        most = min(self.runner.pack_tokens, max(budget, first.next_count))
        limits = PackLimits(most, self.runner.pack_keys, self.scheduler.capacity.chunk)
        return fill_pack(self.scheduler.prompts, limits, partial(self._next_prompt, beside=True))

    def _next_prompt(self, beside: bool = False) -> Sequence | None:
        scheduler = self.scheduler
        found = scheduler.open_prompt(beside) if beside else scheduler.next_prompt()
        try:
            self._apply_changes()
        except Exception:  # of any kind: it must end with the step, or it fails for ever
            self.scheduler.take_up(found)
            raise
        self.scheduler.take_up(found)
        return found

    def _apply_changes(self) -> None:
        self.runner.apply(self.scheduler.take_changes())

    def _fail(self, error: BaseException) -> None:
        """End the requests of a step that raised; all requests if the device cannot recover."""
        bug = LowbitError(f"a step of the engine failed: {type(error).__name__}")
        found = explained(error) or bug
        try:
            self._recover(found)
        except Exception:  # of CUDA, whose device is lost: no request can go on
            self.scheduler.lose_queued(found)
            raise

    def _recover(self, error: LowbitError | None = None) -> None:
        """Drop the sequences of a step that failed or was interrupted, and the prefix cache."""
        running = self.scheduler.running  # keeps page-locked memory that the device may write to
        self.scheduler.lose_running(error)
        self._sent.clear()
        if self.runner.on_gpu:
            torch.cuda.synchronize()
        del running
        self._paused = None
        self.runner.reset()
        self.scheduler.restart()
        self._interrupted = False
