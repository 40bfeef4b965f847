"""Clients by OpenAI's and Anthropic's own libraries, which take seconds to import.

Every process that runs tests collects all of them, and few run these.
"""

from typing import Any

from tests.runtime.serve.conftest import Running


def openai_client(server: Running) -> Any:
    """An `openai.OpenAI`, to be closed by `with`."""
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def anthropic_client(server: Running) -> Any:
    """An `anthropic.Anthropic`, to be closed by `with`."""
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
