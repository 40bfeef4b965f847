"""Settings of a measured run, apart from the code that needs torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """A measured run.

    Attributes:
        prompt_tokens: length of the prompt.
        new_tokens: decoded after it, at least 2; stop tokens are ignored.
        runs: repetitions, of which the median counts; one more warms up.
        sampled: draw tokens by `SAMPLED` instead of taking the likeliest.
    """

    prompt_tokens: int = 64
    new_tokens: int = 128
    runs: int = 3
    sampled: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that the run has in the context; the last one needs no place."""
        return self.prompt_tokens + self.new_tokens - 1

    @property
    def middle(self) -> int:
        """Tokens in the cache at the middle of the run."""
        return self.prompt_tokens + self.new_tokens // 2
