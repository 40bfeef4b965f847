"""The one family of errors a user or a file can cause."""


class LowbitError(Exception):
    """What is wrong, where, what was expected and what was found, in one sentence.

    Attributes:
        hint: what to do about it, or None.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        """Keep the one-line message (no full stop) and the hint shown below it."""
        super().__init__(message)
        self.hint = hint


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
