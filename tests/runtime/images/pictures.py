"""Pictures that tests draw, and their files."""

import io
import random
from typing import Any

from PIL import Image, ImageDraw

from lowbit.formats.image_settings import ImageSettings
from tests.seeing_models import PROCESSOR as PROCESSOR

SETTINGS = ImageSettings(
    patch=16,
    merge=2,
    temporal=2,
    least_pixels=4096,
    most_pixels=200_000,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Lines, blocks and letters in random colors: sharp edges, where ways of resizing differ."""
    rng = random.Random(f"{seed} {width} {height}")
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        color = tuple(rng.randrange(256) for _ in range(3))
        x, y = rng.randrange(width), rng.randrange(height)
        draw.rectangle((x, y, x + rng.randrange(1, 40), y + rng.randrange(1, 40)), fill=color)
        draw.line((x, y, rng.randrange(width), rng.randrange(height)), fill=color[::-1])
        draw.text((y % width, x % height), "SPARK 42", fill=color)
    return image


def saved(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def odd_sizes(count: int) -> list[tuple[int, int]]:
    """Widths and heights: eight extreme ones, and others of no pattern."""
    rng = random.Random(60)
    sizes = [(1, 1), (200, 1), (31, 33), (32, 32), (48, 48), (1000, 5), (7, 900), (448, 447)]
    return sizes + [(rng.randrange(3, 900), rng.randrange(3, 700)) for _ in range(count)]
