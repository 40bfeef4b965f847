"""Token counts of a request, as the APIs write them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lowbit.runtime.serve.job import End


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request.

    Attributes:
        prompt: of the prompt, or of all prompts.
        cached: of them, those that the cache held.
        new: of all answers.
        reasoning: of them, those before the answers.
    """

    prompt: int
    cached: int
    new: int
    reasoning: int

    def openai(self) -> dict[str, Any]:
        """`usage` of chat and completions."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.new,
            "total_tokens": self.prompt + self.new,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def anthropic(self) -> dict[str, Any]:
        """`usage` of messages, whose input tokens are those that no cache held."""
        return {
            "input_tokens": self.prompt - self.cached,
            "output_tokens": self.new,
            "cache_read_input_tokens": self.cached,
            "cache_creation_input_tokens": 0,
            "cache_creation": None,
            "inference_geo": None,
            "output_tokens_details": {"thinking_tokens": self.reasoning},
            "server_tool_use": None,
            "service_tier": "standard",
        }

    def responses(self) -> dict[str, Any]:
        """`usage` of responses."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.new,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.new,
        }


def usage_of(prompt_tokens: int, ends: Iterable[End]) -> Usage:
    """Counts of a request whose answers have ended."""
    found = list(ends)
    return Usage(
        prompt=prompt_tokens,
        cached=min(prompt_tokens, max((end.cached_tokens for end in found), default=0)),
        new=sum(end.new_tokens for end in found),
        reasoning=sum(end.reasoning_tokens for end in found),
    )
