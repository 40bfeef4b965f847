"""Progress bars with the converter's words for its phases."""

from contextlib import AbstractContextManager

from lowbit.formats.shell import tables

PHASES = {
    "sensitivity": "measuring sensitivity",
    "calibrate": "calibrating",
    "check": "checking what is done",
    "convert": "quantizing",
    "answer": "answering prompts",
    "states": "passing text through the trunk",
    "train": "training",
    "verify": "verifying",
    "export": "writing",
    "prove": "reading back",
    "dequantized": "reading matrices back",
    "source": "hashing the source",
    "derive": "quantizing again",
    "compare": "comparing",
    "weights": "comparing weights",
    "images": "comparing answers about pictures",
    "logits": "comparing logits",
    "long": "comparing long texts",
}


def progress_bars(quiet: bool = False) -> AbstractContextManager[tables.Progressed]:
    """A function of (phase, done, in all) that draws one bar a phase while the context is open."""
    return tables.progress_bars(PHASES, quiet)
