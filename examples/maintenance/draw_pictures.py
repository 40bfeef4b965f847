"""Draw the pictures that a report asks about; their texts are in `convert/texts/pictures.py`.

python examples/maintenance/draw_pictures.py convert/texts/data
"""

from pathlib import Path

import click
from PIL import Image, ImageDraw, ImageFont

from lowbit.convert.texts.pictures import PICTURES, READ, SIZE, PictureQuestion

COLORS = 16  # of a file
LEFT = 12  # pixels to the left of a text
# Height of the letters, place of the first line, ink and paper.
STYLES = {
    "receipt": (22, 30, "black", "white"),
    "dialog": (20, 60, "#202020", "#e8e8e8"),
    "code": (18, 70, "#203080", "white"),
    "table": (24, 40, "black", "#f4f0d8"),
    "departures": (26, 40, "#ffd000", "black"),
    "numbers": (30, 40, "black", "white"),
    "words": (28, 50, "#104010", "white"),
    "note": (24, 50, "#202060", "#fff8b0"),
    "terminal": (20, 60, "#c0ffc0", "#101010"),
    "address": (20, 80, "black", "white"),
    "sign": (36, 60, "white", "#1040a0"),
}


def draw(question: PictureQuestion) -> Image.Image:
    """A picture of text, or of shapes."""
    if question.question != READ:
        return shapes(question.answer)
    height, top, ink, paper = STYLES[question.name]
    image = Image.new("RGB", SIZE, paper)
    font = ImageFont.load_default(height)
    pen = ImageDraw.Draw(image)
    for number, line in enumerate(question.answer.split("\n")):
        indent = (len(line) - len(line.lstrip())) * height // 2
        place = LEFT + indent, top + number * height * 3 // 2
        pen.text(place, line.strip(), fill=ink, font=font)
    return image.quantize(COLORS)


def shapes(words: str) -> Image.Image:
    """Squares and circles as they are named, from left to right."""
    image = Image.new("RGB", SIZE, "white")
    pen = ImageDraw.Draw(image)
    for place, named in enumerate(words.split(", ")):
        color, shape = named.split()
        draw_shape = pen.ellipse if shape == "circle" else pen.rectangle
        left = 20 + 100 * place
        draw_shape((left, 80, left + 75, 155), fill=color)
    return image.quantize(COLORS)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Write the files of all pictures into FOLDER."""
    for each in PICTURES:
        draw(each).save(folder / f"{each.name}.png", optimize=True)


if __name__ == "__main__":
    main()
