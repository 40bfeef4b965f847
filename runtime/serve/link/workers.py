"""Messages between the process of the command and its HTTP processes, where these are several."""

from lowbit.runtime.images.shared import SharedBytes
from lowbit.runtime.serve.link.channel import SharedSocket
from lowbit.runtime.serve.link.messages import Message, NotStarted
from lowbit.runtime.serve.metrics import Counts


class Start(Message):
    """First message to an HTTP process."""

    engine: SharedSocket  # its channel to the engine
    totals: SharedBytes  # see `AmongSiblings`
    created: int  # time at which the server was started, seconds since 1970


class Connect(Message):
    """Serve a connection that a client has opened."""

    connection: SharedSocket


class Follow(Message):
    """Go on with another engine; the last one has ended."""

    engine: SharedSocket


class Drain(Message):
    """Refuse new requests, and end once none is left."""


class End(Message):
    """End now: the engine has ended, and its requests with it."""


class AskCounts(Message):
    """Ask an HTTP process for its metrics; `CountsFound` answers."""


class CountsFound(Message):
    """Metrics of an HTTP process."""

    counts: Counts


class AskOthers(Message):
    """Ask for metrics of all other HTTP processes; `OthersFound` answers."""

    number: int


class DropOthers(Message):
    """Forget a question for metrics: nobody waits any more."""

    number: int


class OthersFound(Message):
    """Metrics of each of the other HTTP processes."""

    number: int
    counts: list[Counts]


class Ready(Message):
    """An HTTP process takes connections."""


class Lost(Message):
    """The engine has ended while clients of an HTTP process waited for answers."""


class Closed(Message):
    """Connections that an HTTP process has been given and has no more."""

    count: int


ToWorker = Start | Connect | Follow | Drain | End | AskCounts | OthersFound
FromWorker = Ready | NotStarted | Lost | Closed | CountsFound | AskOthers | DropOthers
