"""Print an answer as it is made; what `generate` and `chat` share."""

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from lowbit.runtime.chat import Message
    from lowbit.runtime.model import Model
    from lowbit.runtime.sampling import SamplingParams
    from lowbit.runtime.stream import Generation, Stream


def show(stream: "Stream", quiet: bool) -> "Generation":
    """Print the pieces as they come: the answer on stdout, reasoning before it on stderr."""
    thinking = False
    for piece in stream.pieces:
        if quiet:
            continue
        if piece.reasoning != thinking:
            _think("thinking: " if piece.reasoning else "\n\n")
            thinking = piece.reasoning
        if piece.reasoning:
            _think(piece.text)
        else:
            click.echo(piece.text, nl=False)
    if thinking:
        _think("\n")
    if not quiet:
        click.echo()
    return stream.generation


def summary(generation: "Generation") -> str:
    """One line: tokens, speed, time to first token, reuse of the cache."""
    timings, count = generation.timings, len(generation.token_ids)
    speed = timings.decode_tokens_per_s
    parts = [
        f"{count} token{'s' if count != 1 else ''}",
        *([f"{speed:.0f} tok/s"] if speed else []),
        f"first token {timings.first_token_s * 1e3:.0f} ms",
        f"prompt {timings.prompt_tokens} tokens"
        + (f" ({timings.reused_tokens} cached)" if timings.reused_tokens else ""),
        generation.finish_reason,
    ]
    return ", ".join(parts)


def sampling_of(model: "Model", options: dict[str, Any]) -> "SamplingParams":
    """Sampling parameters: the model's defaults with the given options put in."""
    from lowbit.runtime.sampling import with_overrides

    return with_overrides(model.defaults, **options)


def opening(system: str | None) -> "list[Message]":
    """A conversation before its first turn: the system message, where there is one."""
    return [] if system is None else [{"role": "system", "content": system}]


def _think(text: str) -> None:
    """A part of the reasoning on stderr."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    console.print(text, style="dim italic", markup=False, emoji=False, soft_wrap=True, end="")
