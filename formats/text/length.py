"""Refusal of prompts that are too long, by their bytes, before they become tokens."""

from lowbit.formats.errors import RequestError

MAX_PROMPT_BYTES = 64_000_000  # of a prompt with any context; a million tokens take 5,000,000


class TooLongError(RequestError):
    """A prompt that is too long for the context."""

    def __init__(self, message: str, hint: str = "shorten the prompt") -> None:
        """Keep the message; the caller, who knows the model, may add a hint."""
        super().__init__(message, hint)


def check_length(length: int, most: int) -> None:
    """Refuse a prompt that is too long for the context with any tokenizer.

    Args:
        length: bytes of the prompt, or a lower bound.
        most: bytes that the context can hold.

    Raises:
        TooLongError: `length` is above `most`.
    """
    if length > most:
        raise TooLongError(
            f"the prompt has {length} bytes or more, the context holds at most {most}"
        )
