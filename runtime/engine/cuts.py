"""Ends of the chunks of a prompt: positions that the tokens before them decide.

Rounding depends on how many tokens a chunk has. Two prompts with a common prefix are cut at the
same places inside it, so what one of them has left in the cache has the bytes that the other would
compute.
"""

from collections.abc import Collection, Sequence

CHUNK = 1024  # most tokens of a prompt that pass the layers together
LEAST = 64  # fewest tokens between two cuts
SNAPSHOT_EVERY = 2048  # tokens of a prompt, where no message ends


def prompt_cuts(ids: Sequence[int], message_ends: Collection[int]) -> list[int]:
    """Lengths at which a prompt is cut, in ascending order.

    A cut follows every CHUNK tokens and every end of a message that is LEAST tokens or more after
    the cut before.

    Args:
        ids: token ids of the prompt.
        message_ends: ids of the tokens that end a message.

    Returns:
        Lengths up to `len(ids)`; that length itself only where it is a cut too.
    """
    cuts: list[int] = []
    last = 0
    ends = [index + 1 for index, id in enumerate(ids) if id in message_ends] if message_ends else []
    for end in (*ends, len(ids)):
        while end - last > CHUNK:
            last += CHUNK
            cuts.append(last)
        if end - last == CHUNK or (end - last >= LEAST and ends and end <= ends[-1]):
            last = end
            cuts.append(last)
    return cuts


def next_cut(cuts: Collection[int], length: int, stop: int) -> int:
    """The first cut behind `length`; the end of the prompt where there is none."""
    return min((cut for cut in cuts if cut > length), default=stop)


def snapshot_due(cut: int, snapshots: Collection[int], reused: int) -> bool:
    """True if the recurrent state is to be kept at a cut: where a message ends, or long behind one.

    Args:
        cut: length of the prompt so far.
        snapshots: lengths at which it has been kept.
        reused: length that the cache held.
    """
    since = cut - max(snapshots, default=reused)
    return bool(since % CHUNK) or since >= SNAPSHOT_EVERY
