"""Load of an engine, and the share of its prompts that it had run before."""

from dataclasses import dataclass

from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.state.pages import EXTRA


@dataclass(frozen=True, slots=True)
class Load:
    """Numbers of now, which may be a step old.

    Attributes:
        running: sequences that have room.
        waiting: sequences that have none yet.
        pages_used: of keys and values, by running sequences.
        pages_kept: by prefixes of ended sequences alone; given back when they are needed.
        pages: in all.
        prompts: that were looked up in the cache, since the start.
        hits: of them, those that begin with tokens that it held.
        reused_tokens: of these prompts, those that were not run again.
    """

    running: int
    waiting: int
    pages_used: int
    pages_kept: int
    pages: int
    prompts: int
    hits: int
    reused_tokens: int


def load_of(engine: Engine) -> Load:
    """The load of an engine, from any thread; it does not wait for the step under way."""
    running, pages = engine.running, engine.runner.state.pages.count - EXTRA
    used = len({page for sequence in running for page in sequence.pages})
    return Load(
        running=len(running),
        waiting=len(engine.waiting),
        pages_used=used,
        pages_kept=max(0, pages + EXTRA - 1 - engine.free_pages - used),
        pages=pages,
        prompts=engine.reuse.prompts,
        hits=engine.reuse.hits,
        reused_tokens=engine.reuse.tokens,
    )
