"""The family of errors that a user or a file can cause."""

from lowbit.formats.printable import printable


class LowbitError(Exception):
    """An error that names, in one sentence, the place, the value expected and the value found.

    Attributes:
        hint: advice to the user, or None.
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
    """A resource that the machine lacks: a GPU, memory, disk space, a free output folder."""


class QueueFullError(ResourceError):
    """As many requests wait as may; one that is asked again later may be served."""


class RequestError(LowbitError):
    """A generation request that cannot be served: empty or too long a prompt, a bad message."""


class SettingError(RequestError):
    """A setting of a request with a value that it cannot have.

    Attributes:
        setting: name of the setting.
    """

    def __init__(self, setting: str, problem: str, hint: str | None = None) -> None:
        """Name the setting, then say what is wrong with it."""
        super().__init__(f"`{setting}` {problem}", hint)
        self.setting = setting


class PublishError(LowbitError):
    """A checkpoint that could not be published: the token, the name, the network, the Hub."""


class TooLongError(RequestError):
    """A prompt that is too long for the context."""

    def __init__(self, message: str, hint: str = "shorten the prompt") -> None:
        """Keep the message; the caller, who knows the model, may add a hint."""
        super().__init__(message, hint)
