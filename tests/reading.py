"""The bundled model that reads, and pictures of words that it never saw."""

import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import lowbit.runtime as lowbit
from lowbit.runtime.text.chat import Message

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "models" / "tiny-qwen3.5-vision"
DATA = ROOT / "tests" / "data" / "words"  # by examples/maintenance/draw_words.py
WIDTH, HEIGHT = 128, 64
GREEDY = lowbit.SamplingParams()
QUESTION = "What does it say?"


def saved(picture: Image.Image) -> bytes:
    """A PNG of it."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


@cache
def pictures() -> tuple[Image.Image, ...]:
    """A hundred, cut from the sheet that holds them."""
    with Image.open(DATA / "words.png") as file:
        sheet = file.convert("RGB")
    places = [(x, y) for y in range(0, sheet.height, HEIGHT) for x in range(0, sheet.width, WIDTH)]
    return tuple(sheet.crop((x, y, x + WIDTH, y + HEIGHT)) for x, y in places)


@cache
def words() -> tuple[str, ...]:
    """Words and numbers of six letters that the pictures show, in 12 px."""
    found: list[str] = json.loads((DATA / "words.json").read_text())
    return tuple(found)


def framed(picture: Image.Image, width: int, height: int) -> Image.Image:
    """A picture in the middle of a larger one of the color of its corner."""
    larger = Image.new("RGB", (width, height), picture.getpixel((0, 0)))
    larger.paste(picture, ((width - WIDTH) // 2, (height - HEIGHT) // 2))
    return larger


def row(pair: Sequence[str]) -> Image.Image:
    """Words beside each other, in 14 px."""
    picture = Image.new("RGB", (192, 64), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    for n, word in enumerate(pair):
        draw.text((192 // len(pair) * n + 6, 20), word, fill="black", font=font)
    return picture


def chart(names: str, heights: Sequence[int]) -> Image.Image:
    """Bars with a letter below each, and its height above."""
    picture = Image.new("RGB", (128, 96), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(12)
    wide = 128 / len(names)
    for n, (name, height) in enumerate(zip(names, heights, strict=True)):
        draw.rectangle((n * wide + 6, 74 - height, n * wide + wide - 8, 74), fill="black")
        draw.text((n * wide + wide / 2 - 4, 90), name, fill="black", font=font, anchor="ls")
        draw.text((n * wide + 6, 70 - height), f"{height}", fill="black", font=font, anchor="ls")
    return picture


def asked(picture: Image.Image, question: str = QUESTION) -> list[Message]:
    """A user's message."""
    shown = {"type": "image", "image": saved(picture)}
    return [{"role": "user", "content": [shown, {"type": "text", "text": question}]}]


def read(
    model: lowbit.Model, shown: Sequence[Image.Image], questions: Sequence[str] = ()
) -> list[str]:
    """Answers about pictures together, greedily."""
    asking = questions or [QUESTION] * len(shown)
    prompts = [asked(*each) for each in zip(shown, asking, strict=True)]
    found = model.generate(prompts, sampling=GREEDY, max_new_tokens=10)
    return [each.text for each in found]


def exact(found: Sequence[str], expected: Sequence[str]) -> int:
    """The number that is right to the letter."""
    return sum(one == other for one, other in zip(found, expected, strict=True))
