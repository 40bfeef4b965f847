"""Settings that are chosen when the server starts, and fixed limits of a request."""

from dataclasses import dataclass

from lowbit.formats.errors import RequestError
from lowbit.runtime.engine.load_options import FEW_SEQUENCES

LOOPBACK = ("127.0.0.1", "::1", "localhost")
REQUEST_TIMEOUT_S = 600.0
HEAD_TIMEOUT_S = 30.0
GRAMMAR_BYTES = 1_000_000_000
STOP_S = 10.0  # for the step under way, when the server ends
# A busy thread leaves the interpreter to another after this time; an event beside one took 0.8 ms
# with it, and 5.5 ms with Python's own 5 ms.
SWITCH_S = 5e-4

# Limits of one request.
MOST_BODY_BYTES = 8 << 20  # a prompt of a million tokens takes 5 MB
MOST_IMAGE_BODY_BYTES = 64 << 20  # for a model that takes images
MOST_DROPPED_BYTES = 32 * MOST_BODY_BYTES  # that a client may still send when it has its answer
THREAD_BODY_BYTES = 64 << 10  # longer bodies are parsed apart from the event loop
# Shorter ones without schemas are prepared on the event loop, where their tokens take 1 ms at most:
# a thread's turn would take more in company.
SHORT_BODY_BYTES = 4 << 10
MOST_MESSAGES = 4096
MOST_PARTS = 4096  # of a message's content
MOST_IDS = 1 << 20  # token ids of a prompt, or in one object
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 256
MOST_CHOICES = 8  # `n`
MOST_PROMPTS = 128  # in one request for completions
MOST_TOOLS = 128
MOST_CALLS = 1024  # of tools, in one turn
MOST_CHOICE_TEXTS = 4096  # that an answer may be one of
MOST_GRAMMAR_CHARACTERS = 64 << 10  # of a grammar or a regular expression
BODY_TIMEOUT_S = 30.0  # between two parts of a body
LEAST_BODY_RATE = 16 << 10  # bytes a second that a body must keep after its first 30 s
MOST_HEAD_BYTES = 64 << 10  # of a request line with its headers


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of a server."""

    # Names of the model; requests may use any of them, answers use the first
    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    api_key: str | None = None  # key that requests must show; None asks for none
    no_auth: bool = False
    queue: int = 64  # answers that may wait while others are generated
    # Longer answers of one client that are generated together; None for all but one, of
    # FEW_SEQUENCES or more
    client_sequences: int | None = None
    head_timeout_s: float = HEAD_TIMEOUT_S  # longest time for the headers of a request to come
    # Longest time from a request to the end of its answer
    request_timeout_s: float = REQUEST_TIMEOUT_S
    # Limit of the reasoning where a request names none; None sets no limit
    max_thinking_tokens: int | None = None
    grammar_bytes: int = GRAMMAR_BYTES  # memory that the grammars of all requests may take
    http_workers: int = 1  # processes that speak HTTP
    restart_engine: bool = False  # load the model again if the engine's process ends
    log_prompts: bool = False
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may read answers; `*` is all
    any_name: bool = False  # requests may use any name for the model
    # Hosts that may be asked for images, as `AllowedHosts` has them; none fetches nothing
    image_hosts: frozenset[str] = frozenset()

    def client_share(self, sequences: int) -> int:
        """Rows that longer answers of one client may have, of so many."""
        if self.client_sequences is not None:
            return self.client_sequences
        return sequences - 1 if sequences >= FEW_SEQUENCES else sequences


def check_exposure(host: str, api_key: str | None, no_auth: bool) -> None:
    """Refuse to open the server to a network without a key, unless `no_auth` asks for it.

    Raises:
        RequestError: the host is not a loopback address.
    """
    if api_key is None and not no_auth and host not in LOOPBACK:
        raise RequestError(
            f"--host {host} lets other machines use this server, and no API key is set",
            hint="give --api-key (or set LOWBIT_API_KEY), or say --no-auth",
        )
