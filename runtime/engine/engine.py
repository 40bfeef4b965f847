"""The engine: every step takes chunks of prompts and a token of each sequence behind its prompt.

One thread owns the steps, and whoever waits for a token lets it run them for everybody. That is the
first thread to wait, so that a lone one hands nothing over; once another waits beside it, and for
asyncio tasks, it is the engine's own thread, until no request runs any more.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock, RLock, get_ident
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.formats.machine.system import explained
from lowbit.runtime.backends.step_threads import StepThreads
from lowbit.runtime.engine.constraints import free_tokens_of, restrict
from lowbit.runtime.engine.draft_source import DraftSource
from lowbit.runtime.engine.early_reads import EarlyReads
from lowbit.runtime.engine.prompt_images import PromptImages, images_of
from lowbit.runtime.engine.request import Limits, Request
from lowbit.runtime.engine.results import PendingStep
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.scheduler import Scheduler, next_chunk_end
from lowbit.runtime.engine.scoring import score_chunk
from lowbit.runtime.engine.sequence import Ended, Sequence
from lowbit.runtime.engine.span import ImageSpan
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.page_counts import EXTRA
from lowbit.runtime.state.sampling_params import SamplingParams, random_seed

P = ParamSpec("P")
T = TypeVar("T")
DRIVER = -1  # in place of a thread's identifier: the engine's own thread owns the steps
IMAGES_TURN_S = 0.02  # of waiting for images where nothing else is to be done
CPU_TURN_S = 0.1  # of prompts in a step on a CPU beside sequences that decode; then a layer ends


@dataclass(slots=True)
class Chunk:
    """A chunk of a prompt that is on its way through the layers."""

    sequence: Sequence  # whose prompt it is
    stop: int  # length of the sequence behind it
    layers: Iterator[Tensor]  # runs a layer for each output that is taken
    # The last output; empty before the first
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))


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
        self.limits = Limits(
            context=runner.context,
            positions=runner.decoder.config.max_position_embeddings,
            table_rows=runner.decoder.config.vocab_size,
            hidden=runner.decoder.config.hidden_size,
            vocabulary=runner.sampler.vocabulary,
            pages=runner.state.pages.count - EXTRA,
            images=runner.decoder.config.rope_sections is not None,
        )
        self.threads = None if runner.on_gpu else StepThreads()
        self.in_prompt = False
        self._lock = RLock()  # held while a step runs
        self._owner = DRIVER  # see `_by_owner`
        self._choosing_owner = Lock()
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
        return self._by_owner(self._advance, sequence)

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
        return self._by_owner(self._whole_step)

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
        if self._early_reads.take() and len(self._sent) > 1:
            self._commit(1)
            return True
        if self._paused is not None and self._paused.sequence.ended:
            self._paused = None
        # On a CPU a sequence decodes from the next step on, else its first token would wait.
        ready = scheduler.decoding if on_gpu else list(scheduler.decoding)
        running, under_way = bool(ready), len(self._sent)
        budget = chunk = scheduler.capacity.chunk
        until = time.perf_counter() + CPU_TURN_S if running and not on_gpu else None
        while budget > 0 and (sequence := self._next_prompt()) is not None:
            budget -= self._run_chunk(sequence, until)
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
        seconds = time.perf_counter() - started
        if self.threads is not None:
            self.threads.note((len(decoding), plain), seconds)
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
        return self._by_owner(self._all_logits, sequence, start)

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
                chunk = self._open_chunk(sequence, last=False)
                self._run_layers(chunk)
                if chunk.stop > start:
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

    @cached_property
    def driver(self) -> ThreadPoolExecutor:
        """The engine's own thread."""
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="lowbit-engine")

    def _by_owner(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Let the owner of the steps do something: this thread if nothing runs, else `driver`."""
        caller = get_ident()
        if self._owner != caller:
            with self._choosing_owner:
                running = any(not each.cancelled for each in self.scheduler.running)
                self._owner = DRIVER if running else caller
        if self._owner == caller:
            return work(*args, **kwargs)
        return self.driver.submit(work, *args, **kwargs).result()

    async def advance_later(self, sequence: Sequence) -> bool:
        """Let the engine's own thread `advance` a sequence, without blocking the event loop."""
        self._owner = DRIVER
        return await asyncio.wrap_future(self.driver.submit(self._advance, sequence))

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._by_owner(self._forget)

    def _forget(self) -> None:
        with self._lock, self._working():
            self.scheduler.blocks.forget()

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

    def _run_chunk(self, sequence: Sequence, until: float | None) -> int:
        """Run the next chunk of a prompt; behind the last chunk choose the first new token.

        Args:
            until: time after which the chunk pauses between two layers; None for no pause.

        Returns:
            Tokens of the chunk; most of a step where it pauses, since nothing else fits into one.
        """
        scheduler, request = self.scheduler, sequence.request
        first = sequence.length
        read = self.drafting is not None or request.prompt_logprobs is not None
        if self._paused is None:
            made = self._make_embeddings(sequence, until)
            if made is None:
                return 0
            if not made:
                return scheduler.capacity.chunk
            self._paused = self._open_chunk(sequence, last=not read)
        chunk = self._paused
        if not self._run_layers(chunk, until):
            return scheduler.capacity.chunk
        self._paused, hidden = None, chunk.hidden
        count = sequence.length - first
        if self.drafting is not None and sequence.count > 0:
            self.drafting.read_prompt(sequence, first, hidden)
        if request.prompt_logprobs is not None:
            score_chunk(sequence, first, hidden, self.decoder, self.runner.logits)
        if sequence.images is not None:
            sequence.images.drop(sequence.length)
        if sequence.length < len(request.prompt):
            return count
        scheduler.keep_prompt(sequence)
        if request.constraint is not None:
            self._end(restrict([sequence], self.runner.sampler))
            self._compute_forced_tokens([sequence])
        if not sequence.ended:
            if self.drafting is not None:
                self.drafting.begin(sequence)
            self._sent.append(self.runner.begin(sequence, hidden[-1:]))
            scheduler.begin_decoding(sequence)
        return count

    def _make_embeddings(self, sequence: Sequence, until: float | None) -> bool | None:
        """Make embeddings of the next chunk's images.

        A token behind the chunk is made as well, which the head for several tokens reads.

        Returns:
            False if it pauses, as `_run_chunk` does; None if it fails, which ends the request.
        """
        first, images = sequence.length, sequence.images
        if images is None:
            return True
        stop = next_chunk_end(sequence.chunk_ends, first, len(sequence.request.prompt))
        if until is None and not self.runner.on_gpu:  # so that the request can be cancelled
            until = time.perf_counter() + CPU_TURN_S
        self.in_prompt = True
        try:
            return images.make(first, stop + 1 - first, until, bool(self.scheduler.decoding))
        except Exception as error:  # of whoever gives the images: no other request has a part in it
            found = explained(error)
            if found is None:
                raise
            self._end([(sequence, found)])
            return None
        finally:
            self.in_prompt = False

    def _open_chunk(self, sequence: Sequence, last: bool) -> Chunk:
        prompt = sequence.request.prompt
        stop = next_chunk_end(sequence.chunk_ends, sequence.length, len(prompt))
        layers = self.runner.chunk(sequence, prompt[sequence.length : stop], last)
        return Chunk(sequence, stop, layers)

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
        self.scheduler.blocks.count_chunk(chunk.sequence, chunk.stop)
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

    def _next_prompt(self) -> Sequence | None:
        found = self.scheduler.next_prompt()
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
        found = explained(error) or LowbitError(
            f"a step of the engine failed: {type(error).__name__}"
        )
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
