"""Settings of a measured run, apart from the code that needs torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """A measured run."""

    prompt_tokens: int = 64  # length of the prompt
    new_tokens: int = 128  # decoded after it, at least 2; stop tokens are ignored
    runs: int = 3  # repetitions, of which the median counts; one more warms up
    sampled: bool = False  # draw tokens by `SAMPLED` instead of taking the likeliest

    @property
    def tokens(self) -> int:
        """Tokens that the run has in the context; the last one needs no place."""
        return self.prompt_tokens + self.new_tokens - 1

    @property
    def middle(self) -> int:
        """Tokens in the cache at the middle of the run."""
        return self.prompt_tokens + self.new_tokens // 2
