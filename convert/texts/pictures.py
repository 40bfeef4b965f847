"""Small pictures that a model is asked about, with their right answers.

`examples/maintenance/draw_pictures.py` has drawn the files. All have one size, so that prompts with
them have one layout.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

SIZE = 320, 224  # pixels
READ = "Write down the text in the picture, line by line, and nothing else."
NAME = "Name the shapes in the picture from left to right, each with its color, and nothing else."


@dataclass(frozen=True, slots=True)
class PictureQuestion:
    """A picture, a question about it, and the answer."""

    name: str  # of the file, without its ending
    question: str
    answer: str

    @property
    def content(self) -> bytes:
        """The file, a PNG."""
        return (Path(__file__).with_name("data") / f"{self.name}.png").read_bytes()


PICTURES = tuple(
    PictureQuestion(name, question, answer)
    for name, question, answer in (
        ("receipt", READ, "Bread 2.40\nMilk 1.15\nApples 3.80\nTotal 7.35"),
        ("dialog", READ, "Error 4107: the disk\n/dev/sdb1 is full.\nFree 12 GB and retry."),
        ("code", READ, "for i in range(17):\n    total += i * 23\nprint(total)"),
        ("table", READ, "Oslo 418 km\nRiga 962 km\nBern 1,305 km"),
        ("departures", READ, "09:42 Leeds 3\n10:17 York 8\n11:05 Derby 12"),
        ("numbers", READ, "8314 2075\n6690 1148\n3957 7402"),
        ("words", READ, "harbor quilt\nmarble fennel\nlantern vivid"),
        ("note", READ, "The meeting moves to\nThursday at 14:30,\nroom B217."),
        ("terminal", READ, "$ git status\nOn branch main\nnothing to commit"),
        ("address", READ, "mira.holt@lark.example\n+44 20 7946 0381"),
        ("sign", READ, "QUIET ZONE\n22:00 to 06:30"),
        ("shapes", NAME, "blue square, red circle, green square"),
    )
)


def pictures_sha256() -> str:
    """SHA-256 of all files, questions and answers: figures of equal ones can be compared."""
    digest = hashlib.sha256()
    for each in PICTURES:
        for part in (each.content, each.question.encode(), each.answer.encode()):
            digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
