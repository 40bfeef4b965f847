"""Time and memory that the masks of an answer take, though none can be interrupted."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import thread_time

from lowbit.formats.errors import RequestError

# Time of the processor for the masks of one answer: at once, and for every mask. With 248,320
# tokens a mask takes 0.1 ms and seldom 5.
BURST_S = 0.5
MASK_S = 0.005
WAIT_S = 0.5  # for a mask of a large grammar, on a busy machine
MOST_LATE = 2  # masks that nobody waits for any more
IDLE_S = 1.0  # until a thread without work ends
# A mask that takes longer than usual does so for new states of the lexer. Of all grammars that were
# tried with 151,936 tokens, none grew by more than 125 MB a second, nor by more than 48 MB.
USUAL_S = 0.0002
GROWTH_BYTES_A_S = 125e6
MOST_GROWTH_BYTES = 48e6
HINT = "give every text one derivation, and prefer long terminals to single letters"

Work = Callable[[], object]
Answer = SimpleQueue[BaseException | None]


@dataclass(slots=True, weakref_slot=True, eq=False)
class GrammarSize:
    """Memory of a grammar, which lives as long as anybody can follow it."""

    compiled: int = 0  # bytes of the grammar before its first answer
    grown: float = 0.0  # bytes that masks have added since, estimated by their time

    @property
    def bytes(self) -> int:
        """Bytes in all."""
        return self.compiled + int(self.grown)

    def note(self, seconds: float) -> None:
        """Count what masks have added that took so many seconds of the processor."""
        more = GROWTH_BYTES_A_S * max(0.0, seconds - USUAL_S)
        self.grown = min(MOST_GROWTH_BYTES, self.grown + more)


@dataclass(slots=True)
class MaskTime:
    """Time that the masks of one answer take, those of copies included."""

    # Runs the masks of a grammar so large that one alone may take too long; None for others
    watch: "Watch | None"
    size: GrammarSize = field(default_factory=GrammarSize)  # memory of the grammar
    left_s: float = BURST_S  # seconds that they may still take

    def check(self) -> None:
        """Refuse to go on.

        Raises:
            RequestError: the answer has used up its time.
        """
        if self.left_s < 0:
            raise RequestError("the grammar is too ambiguous: its masks take too long", hint=HINT)

    def measure(self, work: Work) -> None:
        """Do some work and count its time; errors as in `check`, and those of the work."""
        self.check()
        started = thread_time()
        work()
        spent = thread_time() - started
        self.left_s -= spent
        self.size.note(spent)

    def mask(self, work: Work) -> None:
        """Make a mask and count its time; errors as in `measure`, where it takes too long, too."""
        self.left_s += MASK_S
        if self.watch is None:
            self.measure(work)
            return
        self.check()
        if self.watch.late >= MOST_LATE:
            raise RequestError("masks of other grammars keep the processor busy; try again later")
        if not self.watch.run(lambda: self.measure(work), WAIT_S):
            self.left_s = -math.inf
            self.check()


class Watch:
    """Runs work that releases the interpreter; work that takes too long ends on its own.

    Attributes:
        late: pieces of work that nobody waits for any more and that have not ended.
    """

    def __init__(self) -> None:
        """Start without a thread."""
        self.late = 0
        self._lock = Lock()
        self._idle: list[SimpleQueue[tuple[Work, Answer]]] = []  # threads that wait for work

    def run(self, work: Work, seconds: float) -> bool:
        """Do some work on another thread; False if it takes longer, and goes on alone.

        Raises:
            BaseException: whatever the work raises.
        """
        answer: Answer = SimpleQueue()
        with self._lock:
            inbox = self._idle.pop() if self._idle else self._started()
        inbox.put((work, answer))
        try:
            error = answer.get(timeout=seconds)
        except Empty:
            with self._lock:
                self.late += 1
            Thread(target=self._await, args=(inbox, answer), daemon=True).start()
            return False
        self._free(inbox)
        if error is not None:
            raise error
        return True

    def _started(self) -> SimpleQueue[tuple[Work, Answer]]:
        inbox: SimpleQueue[tuple[Work, Answer]] = SimpleQueue()
        Thread(target=self._serve, args=(inbox,), name="lowbit-mask", daemon=True).start()
        return inbox

    def _serve(self, inbox: SimpleQueue[tuple[Work, Answer]]) -> None:
        """Do one piece of work after another; end where none comes."""
        while True:
            try:
                work, answer = inbox.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    if inbox not in self._idle:
                        continue  # somebody has taken it, and its work comes
                    self._idle.remove(inbox)
                return
            try:
                work()
            except BaseException as error:  # for the thread that waits
                answer.put(error)
            else:
                answer.put(None)
            del work, answer  # a matcher may be large

    def _await(self, inbox: SimpleQueue[tuple[Work, Answer]], answer: Answer) -> None:
        answer.get()
        with self._lock:
            self.late -= 1
        self._free(inbox)

    def _free(self, inbox: SimpleQueue[tuple[Work, Answer]]) -> None:
        with self._lock:
            self._idle.append(inbox)
