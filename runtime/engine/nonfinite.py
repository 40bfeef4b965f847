"""The error of logits from which no token can be chosen."""

from lowbit.formats.errors import CheckpointError


def nonfinite_error(tokens: int) -> CheckpointError:
    """The error of a sequence whose logits after `tokens` tokens are NaN or infinite."""
    return CheckpointError(
        f"the logits after {tokens} tokens are NaN or infinite, so no token can be chosen",
        hint="some activation overflows: look for damaged weights with `lowbit-convert verify "
        "MODEL` and `lowbit-convert report MODEL`, or convert the original again",
    )
