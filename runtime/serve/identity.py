"""Names of answers."""

import secrets


def new_id(prefix: str) -> str:
    """An id that nobody can guess, such as `chatcmpl-0f3a...`."""
    return f"{prefix}{secrets.token_hex(12)}"
