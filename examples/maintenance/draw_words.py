"""Draw the letters that train_tiny_vision.py composes, and pictures of words that it never saw.

python examples/maintenance/draw_words.py FONTS OUT

FONTS holds TrueType files; the default font of Pillow joins them. The bundled pictures are in fonts
from wheels: DejaVu Sans, Sans Bold, Sans Mono and Serif (matplotlib), Roboto Regular and Medium
(font-roboto), Source Sans and Serif (font-source-sans-pro, font-source-serif-pro), Hanken Grotesk
(font-hanken-grotesk), Manrope Medium (font-manrope), Caladea (font-caladea).

OUT gets `atlas.npz`, each letter in each font and size, and `held_out.npz` and `words.png`,
pictures that Pillow drew as a whole.
"""

import json
import random
import string
from pathlib import Path
from typing import Any

import click
import numpy
from PIL import Image, ImageDraw, ImageFont

CHARACTERS = string.ascii_letters + string.digits + ".,-%$:/ "
SIZES = (11, 12, 13, 14, 15, 16, 18, 20, 24, 28)
BOX, LEFT, BASELINE = 40, 4, 30  # side of a letter's square, and where its origin lies in it
WIDTH, HEIGHT = 128, 64  # of a picture
SMALL = 12  # the size that counts
COLUMNS = 10  # of pictures in the sheet
SYLLABLES = "bcdfghjklmnprstvwz", "aeiou"


def faces(folder: Path) -> list[str | None]:
    """Font files by name, and None, which is the font that Pillow has."""
    kinds = (".ttf", ".otf")
    return [*sorted(str(p) for p in folder.iterdir() if p.suffix in kinds), None]


def face(path: str | None, size: int) -> Any:
    """A font in a size."""
    return ImageFont.load_default(size) if path is None else ImageFont.truetype(path, size)


def letters(font: Any) -> tuple[list[Any], list[float]]:
    """Each character in its square, and how far it moves the next one."""
    squares, advances = [], []
    for character in CHARACTERS:
        square = Image.new("L", (BOX, BOX))
        ImageDraw.Draw(square).text((LEFT, BASELINE), character, fill=255, font=font, anchor="ls")
        squares.append(numpy.asarray(square))
        advances.append(font.getlength(character))
    return squares, advances


def unseen(rng: random.Random) -> str:
    """A word of six letters or a number of six digits."""
    kind = rng.randrange(8)
    if kind < 3:
        return "".join(rng.choice(string.digits) for _ in range(6))
    if kind < 6:
        word = "".join(rng.choice(SYLLABLES[place % 2]) for place in range(6))
    else:
        word = "".join(rng.choice(string.ascii_lowercase) for _ in range(6))
    return (word, word.upper(), word.capitalize())[rng.randrange(3)]


def shown(text: str, font: Any, rng: random.Random) -> Any:
    """A picture of a text, somewhere in it."""
    dark, light = (rng.randrange(0, 70) for _ in range(3)), (rng.randrange(205, 256) for _ in "rgb")
    colors = [(0, 0, 0), (255, 255, 255)] if rng.random() < 0.5 else [tuple(dark), tuple(light)]
    if rng.random() < 0.25:
        colors.reverse()
    picture = Image.new("RGB", (WIDTH, HEIGHT), colors[1])
    left, top, right, bottom = font.getbbox(text, anchor="ls")
    place = (
        rng.randint(1 - min(left, 0), WIDTH - 1 - int(right)),
        rng.randint(1 - int(top), HEIGHT - 1 - int(bottom)),
    )
    ImageDraw.Draw(picture).text(place, text, fill=colors[0], font=font, anchor="ls")
    return picture


def pictures(folder: Path, count: int, seed: int) -> tuple[list[Any], list[str]]:
    """Pictures of texts in 12 px, the fonts in turn, and what they say."""
    rng = random.Random(seed)
    fonts = [face(path, SMALL) for path in faces(folder)]
    texts: list[str] = []
    while len(texts) < count:
        text = unseen(rng)
        if not text.startswith("I") or text.isupper():  # else it looks like an l in most fonts
            texts.append(text)
    return [shown(t, fonts[n % len(fonts)], rng) for n, t in enumerate(texts)], texts


@click.command()
@click.argument("fonts", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def main(fonts: Path, out: Path) -> None:
    """Draw letters and pictures with the FONTS of a folder into the folder OUT."""
    out.mkdir(parents=True, exist_ok=True)
    found = [(path, size) for path in faces(fonts) for size in SIZES]
    drawn = [letters(face(*each)) for each in found]
    numpy.savez_compressed(
        out / "atlas.npz",
        squares=numpy.stack([numpy.stack(squares) for squares, _ in drawn]),
        advances=numpy.array([advances for _, advances in drawn], numpy.float32),
        sizes=numpy.array([size for _, size in found], numpy.int64),
    )
    images, texts = pictures(fonts, 240, seed=1)
    stacked = numpy.stack([numpy.asarray(image) for image in images])
    numpy.savez_compressed(out / "held_out.npz", images=stacked, texts=numpy.array(texts))
    images, texts = pictures(fonts, 100, seed=2)
    sheet = Image.new("RGB", (WIDTH * COLUMNS, HEIGHT * len(images) // COLUMNS))
    for number, image in enumerate(images):
        sheet.paste(image, (number % COLUMNS * WIDTH, number // COLUMNS * HEIGHT))
    sheet.save(out / "words.png", optimize=True)
    (out / "words.json").write_text(json.dumps(texts, indent=0) + "\n")


if __name__ == "__main__":
    main()
