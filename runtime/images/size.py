"""The size that an image is resized to; needs no torch."""

import math

from lowbit.formats.image_settings import ImageSettings


def smart_size(width: int, height: int, settings: ImageSettings) -> tuple[int, int]:
    """Width and height that an image is resized to.

    Both are multiples of a token's side, their area is within the settings' limits where the shape
    allows it, and the aspect stays as near as that lets it.
    """
    factor = settings.factor
    w, h = round(width / factor) * factor, round(height / factor) * factor
    if w * h > settings.most_pixels:
        shrink = math.sqrt(width * height / settings.most_pixels)
        w = max(factor, math.floor(width / shrink / factor) * factor)
        h = max(factor, math.floor(height / shrink / factor) * factor)
    elif w * h < settings.least_pixels:
        grow = math.sqrt(settings.least_pixels / (width * height))
        w = math.ceil(width * grow / factor) * factor
        h = math.ceil(height * grow / factor) * factor
    return w, h
