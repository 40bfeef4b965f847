"""The one family of errors a user or a file can cause."""

from lowbit.formats.printable import printable


class LowbitError(Exception):
    """What is wrong, where, what was expected and what was found, in one sentence.

    Attributes:
        hint: what to do about it, or None.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        """Keep the one-line message (no full stop) and the hint shown below it.

        Both may quote names and values of a file, so control characters become escapes.
        """
        super().__init__(printable(message))
        self.hint = None if hint is None else printable(hint)


class CheckpointError(LowbitError):
    """A checkpoint folder or file that cannot be read as safetensors, or lacks tensors."""


class FormatError(LowbitError):
    """A packed checkpoint that breaks SPEC.md, or uses a scheme that cannot be served."""


class UnsupportedModelError(LowbitError):
    """An architecture, or a feature of one, that is not implemented."""


class QuantizationError(LowbitError):
    """A recipe that cannot be carried out, or weights that cannot be quantized."""


class ResourceError(LowbitError):
    """The machine lacks what was asked for: a GPU, memory, disk space, a free output folder."""


class RequestError(LowbitError):
    """A generation request that cannot be served: empty or too long a prompt, a bad message."""


class PublishError(LowbitError):
    """A checkpoint that could not be published: the token, the name, the network, the Hub."""
