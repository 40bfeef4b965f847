"""Examples of what changes: places where the packed model ranks another token first."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from lowbit.convert.measure.metrics import TokenFigures
from lowbit.convert.measure.record import Flip
from lowbit.convert.original.evaluation_text import EvalText
from lowbit.formats.text.tokenizer import load_text_tokenizer

MOST = 12
BEFORE = 80  # characters shown


def find_flips(folder: Path, texts: Sequence[EvalText], figures: TokenFigures) -> tuple[Flip, ...]:
    """At most 12 tokens where the first choice changes: the largest KL first, one a window.

    Args:
        folder: of the original checkpoint, with tokenizer.json.
        texts: whose windows were compared, one text after the other.
        figures: of their scored tokens.
    """
    decode = load_text_tokenizer(folder, "the logit report").decode
    scored = texts[0].window - 1
    ends = list(accumulate(len(text.windows) for text in texts))
    changed = (~figures.agree).nonzero()[:, 0]
    order = changed[figures.kl[changed].argsort(descending=True, stable=True)]
    flips: dict[int, Flip] = {}  # by window
    for token in order.tolist():
        window, position = divmod(token, scored)
        if window in flips:
            continue
        number = next(i for i, end in enumerate(ends) if window < end)
        text = texts[number]
        ids = text.windows[window - ends[number]].tolist()  # counted from the end
        tops = (int(top[token]) for top in (figures.top_original, figures.top_packed))
        actual, original, packed = (decode([i]) for i in (ids[position + 1], *tops))
        flips[window] = Flip(
            kind=text.text.name,
            before=decode(ids[: position + 1])[-BEFORE:],
            actual=actual,
            original=original,
            packed=packed,
            p_original=float(figures.p_original[token]),
            p_packed=float(figures.p_packed[token]),
            kl=float(figures.kl[token]),
        )
        if len(flips) == MOST:
            break
    return tuple(flips.values())
