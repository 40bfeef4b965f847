"""Prompts that are too long, told by their bytes before they become tokens."""

from lowbit.formats.errors import RequestError

MAX_PROMPT_BYTES = 64_000_000  # of a prompt, whatever the context; a million tokens take 5,000,000


class TooLongError(RequestError):
    """A prompt that no tokenizer makes fit the context."""

    def __init__(self, message: str) -> None:
        """Keep the message; whoever knows the model can advise a larger context."""
        super().__init__(message, hint="shorten the prompt")


def check_length(length: int, most: int) -> None:
    """Refuse a prompt that no tokenizer could make fit the context.

    Args:
        length: of the prompt in bytes, or a lower bound of it.
        most: bytes that the context can hold.

    Raises:
        TooLongError: it is longer.
    """
    if length > most:
        raise TooLongError(
            f"the prompt has {length} bytes or more, the context holds at most {most}"
        )
