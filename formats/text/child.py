"""The child process that renders templates, runs tokenizers and tries grammars under limits.

`child_process.py` starts this file as a script: it imports nothing of lowbit, writes one JSON line
when it is ready, and then reads one JSON job a line and writes one JSON reply a line. A timer of
the kernel ends the process when a job computes for too long; time for which the process is stopped,
or others have the processor, does not count. Argument: a JSON object with `path`
(sys.path), `library` (a key of LIBRARIES) and `memory_bytes`.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from importlib import import_module
from typing import Any, NoReturn

Job = dict[str, Any]
LIBRARIES = {  # modules to import; jinja2 imports some of its own late
    "jinja2": ("jinja2.sandbox", "jinja2.ext", "jinja2.debug", "jinja2.constants"),
    "tokenizers": ("tokenizers",),
    "llguidance": ("llguidance",),
}
MAX_MESSAGE = 300  # characters of an error's message


class JobError(Exception):
    """A job that failed.

    Attributes:
        kind: `syntax`, `memory`, `output`, `time`, `died` or `failed`, as in
            `child_process.WorkerError`; `start` for a process that cannot do any job.
    """

    def __init__(self, kind: str, message: str) -> None:
        """Keep both."""
        super().__init__(message)
        self.kind = kind


def main() -> None:
    """Serve jobs until standard input ends."""
    try:
        prepare(json.loads(sys.argv[1]))
    except BaseException as error:  # MemoryError too
        write(refusal(JobError("start", str(error_of(error)))))
        return
    write(b"{}")
    serve: Callable[[Job], Any] = Handler()
    for line in sys.stdin.buffer:
        write(reply(serve, line))


def prepare(options: dict[str, Any]) -> None:
    """Set the limits and import the modules of the library."""
    import resource  # not above, where the parent would need it: Windows has none

    sys.path[:] = options["path"]
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may ignore or block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    # Else a SIGINT from outside would be a KeyboardInterrupt, and so a failure, of the job at hand
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    limit(resource.RLIMIT_AS, options["memory_bytes"])
    limit(resource.RLIMIT_CORE, 0)
    for module in LIBRARIES[options["library"]]:
        import_module(module)
    limit(resource.RLIMIT_FSIZE, 0)  # not earlier: an import may store its bytecode


def limit(kind: int, most: int) -> None:
    """Lower a limit of this process, where the system has such a limit: macOS lacks RLIMIT_AS."""
    import resource

    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (most, most))


def write(line: bytes) -> None:
    """Send a line to the parent."""
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def reply(serve: Callable[[Job], Any], line: bytes) -> bytes:
    """Run a job; any exception becomes a reply."""
    try:
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])
        result = {"value": serve(job)}
        return json.dumps(result).encode()
    except BaseException as error:  # MemoryError, panics of tokenizers, errors of templates
        return refusal(error_of(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def refusal(error: JobError) -> bytes:
    """Reply that reports a failure."""
    return json.dumps({"error": error.kind, "message": str(error)}).encode()


def error_of(error: BaseException) -> JobError:
    """Reason of any exception in one line."""
    if isinstance(error, JobError):
        return error
    if isinstance(error, MemoryError):
        return JobError("memory", "out of memory")
    try:
        text = str(error)[:MAX_MESSAGE]
    except Exception:
        text = ""
    if type(error) is Exception or type(error).__module__.startswith("jinja2"):
        return JobError("failed", text)
    return JobError("failed", f"{type(error).__name__}: {text}" if text else type(error).__name__)


class Handler:
    """Runs jobs, and keeps the template, the tokenizer and the vocabulary between them."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.source: str | None = None
        self.template: Any = None
        self.tokenizer: Any = None
        self.unreadable = "no tokenizer has been loaded"
        self.vocabulary: Any = None

    def __call__(self, job: Job) -> Any:
        """Run the job that `do` names."""
        if job["do"] == "compile":
            return self.compile(job["source"])
        if job["do"] == "render":
            self.compile(job["source"])
            return "".join(bounded(self.template.generate(**job["values"]), job["most"]))
        if job["do"] == "load":
            return self.load(job["tokenizer"])
        if job["do"] == "vocabulary":
            self.vocabulary = vocabulary_of(job["count"], job["special"], job["stops"])
            return None
        if job["do"] == "grammar":
            return self.try_grammar(job)
        if self.tokenizer is None:
            raise JobError("syntax", self.unreadable)
        if job["do"] == "encode":
            texts, framed, mark = job["texts"], job["framed"], job["mark"]
            if mark:
                return [ids_of_marked(self.tokenizer, text, framed, mark) for text in texts]
            return [self.tokenizer.encode(text, add_special_tokens=framed).ids for text in texts]
        return self.tokenizer.decode(job["ids"], skip_special_tokens=False)

    def compile(self, source: str) -> None:
        """Compile a template and keep it."""
        if source == self.source:
            return
        try:
            self.template = new_environment().from_string(source)
        except MemoryError:
            raise
        except Exception as error:
            raise JobError("syntax", str(error_of(error))) from None
        self.source = source

    def load(self, content: str) -> None:
        """Load a tokenizer and keep it."""
        from tokenizers import Tokenizer

        try:
            self.tokenizer = Tokenizer.from_str(content)
        except BaseException as error:  # a panic is no Exception
            self.unreadable = str(error_of(error))
            raise
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def try_grammar(self, job: Job) -> dict[str, Any]:
        """Compile a grammar and make its first mask in a copy of this process; see `tried`.

        The end of the copy gives back all memory, and costs this process nothing where a limit of
        time or a full stack ends it.
        """
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.write(writing, reply_of_copy(self.vocabulary, job))
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            data = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        name = signal.Signals(-status).name if status < 0 else ""
        if name == "SIGPROF":
            raise JobError("time", "out of time")
        if name or not data:
            raise JobError("died", name or "no result")
        result: dict[str, Any] = json.loads(data)
        return result


def reply_of_copy(vocabulary: Any, job: Job) -> bytes:
    """Result of `tried` as JSON, on a stack of limited size and in limited time."""
    found: list[dict[str, Any]] = []
    signal.setitimer(signal.ITIMER_PROF, job["cpu_seconds"])
    threading.stack_size(job["stack_bytes"])
    work = threading.Thread(target=lambda: found.append(tried(vocabulary, job)))
    work.start()
    work.join()
    return json.dumps(found[0]).encode() if found else b""


def vocabulary_of(count: int, special: dict[str, str], stops: list[int]) -> Any:
    """As many tokens as a model has: its special ones, all single bytes, and empty ones.

    With them a grammar compiles as with all tokens, without the seconds that those take.
    """
    from llguidance import LLTokenizer

    class Vocabulary:
        """The parts of a tokenizer that the library reads."""

        is_tokenizer_wrapper = True
        bos_token_id = None

        def __init__(self) -> None:
            self.eos_token_id = stops[0]
            self.special_token_ids = [int(id) for id in special]
            self.tokens = [b""] * count
            free = [id for id in range(len(special) + 256) if str(id) not in special]
            for byte, id in enumerate(free[:256]):
                self.tokens[id] = bytes((byte,))
            for name, text in special.items():
                self.tokens[int(name)] = text.encode()

        def __call__(self, text: str | bytes) -> list[int]:
            raw = text.encode() if isinstance(text, str) else text
            return [self.tokens.index(bytes((byte,))) for byte in raw]

    return LLTokenizer(Vocabulary(), n_vocab=count, eos_token=stops)


def tried(vocabulary: Any, job: Job) -> dict[str, Any]:
    """Result of trying a grammar: its error (empty if usable), its size, and its bytes.

    `large` says that it has more symbols than few. `bytes` is None where the system does not tell.
    """
    limits = job["limits"]
    few = job["few"]
    found = compiled(vocabulary, job["grammar"], limits | {"max_grammar_size": few})
    large = bool(found["error"])
    return (compiled(vocabulary, job["grammar"], limits) if large else found) | {"large": large}


def compiled(vocabulary: Any, grammar: str, limits: dict[str, Any]) -> dict[str, Any]:
    """Error and bytes of a grammar behind its first mask."""
    from llguidance import LLMatcher, LLParserLimits

    before = allocated_bytes()
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(**limits))
    matcher.compute_bitmask()  # finds what only shows when it is used
    after = allocated_bytes()
    error: str = matcher.get_error() if matcher.is_error() else ""
    taken = None if before is None or after is None else max(0, after - before)
    return {"error": error, "bytes": taken}


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"),
            *("fordblks", "keepcost"),
        )
    )


def allocated_bytes() -> int | None:
    """Bytes that this process has allocated; None without glibc 2.33."""
    try:
        count = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    count.restype = MallInfo
    found = count()
    return int(found.uordblks + found.hblkhd)


def ids_of_marked(tokenizer: Any, text: str, framed: bool, mark: str) -> list[int]:
    """Ids of a text in which a mark keeps some places from being added tokens.

    The text between two added tokens is encoded without the mark, as if there were none of them.

    Args:
        text: with the mark behind the first character of each of these places.
        framed: add the tokens that the post-processor puts around a text.
        mark: one character, which is no part of the text.
    """
    [encoding] = tokenizer.encode_batch([text], add_special_tokens=framed)
    added = tokenizer.get_added_tokens_decoder()
    ids: list[int] = []
    run: list[int] = []  # ids since the last added token
    begin = 0
    ends = zip(encoding.ids, encoding.offsets, strict=True)
    for id, (first, last) in (*ends, (None, (len(text), len(text)))):
        if id is not None and id not in added:
            run.append(id)
            continue
        between = text[begin:first]
        ids += plain_ids(tokenizer, between.replace(mark, "")) if mark in between else run
        ids += () if id is None else (id,)
        begin, run = max(begin, last), []
    return ids


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text as words alone, none of them an added token."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    words = [(text, None)]
    if tokenizer.pre_tokenizer is not None:
        words = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    model = tokenizer.model
    return [token.id for word, _ in words for token in model.tokenize(word)]


def bounded(pieces: Iterator[str], most: int) -> Iterator[str]:
    """Pass pieces on, and fail once they have more than `most` characters in all."""
    for piece in pieces:
        most -= len(piece)
        if most < 0:
            raise JobError("output", "too much output")
        yield piece


def new_environment() -> Any:
    """The jinja2 environment that transformers gives to chat templates."""
    import jinja2
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """The tag `{% generation %}` around the assistant's text, which renders as its content."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares no ClassVar

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_render")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _render(self, caller: Callable[[], str]) -> str:
            return caller()

    class Dict:
        """The function `dict` without the type's attributes."""

        def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
            return dict(*args, **entries)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class Names(Namespace):
        """The function `namespace`, which refuses names that begin with an underscore."""

        # Positional-only, as in jinja2, so that `self` may be an entry.
        def __init__(*args: Any, **entries: Any) -> None:
            names = dict(*args[1:], **entries)
            for name in names:
                _check_name(name)
            Namespace.__init__(args[0], names)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold the name {name!r}")

    def raise_exception(message: Any) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": Dict(),
        "namespace": Names,
    }
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


if __name__ == "__main__":
    main()
