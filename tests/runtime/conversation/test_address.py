"""Addresses of servers as users write them."""

import pytest

from lowbit.formats.errors import RequestError
from lowbit.runtime.conversation.address import server_url


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("https://there/v1", "https://there/v1"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(text: str, found: str) -> None:
    assert str(server_url(text)) == found


@pytest.mark.parametrize(
    "text", ["", "ftp://there", "http://", "http://x:99999", "http://[::1", "//", "a\nb"]
)
def test_no_addresses(text: str) -> None:
    with pytest.raises(RequestError, match="is no address of a server") as raised:
        server_url(text)
    assert raised.value.hint == "as in http://localhost:8000"
