"""Patches of an image: the vision tower's input, in the order in which tokens are merged."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.image_settings import CHANNELS, ImageSettings
from lowbit.runtime.images.decode import ImageLimits, decode_image
from lowbit.runtime.images.picture import Pixels, digest_of
from lowbit.runtime.images.resize import resize


@dataclass(frozen=True, slots=True)
class ImagePatches:
    """An image as numbers; `merge * merge` patches that follow each other become one token."""

    values: Tensor  # [patches, channels * temporal * patch * patch] float32
    grid: tuple[int, int]  # rows and columns of patches, multiples of `merge`
    merge: int  # patches along a side of a token's square
    digest: bytes  # of the file and the settings: the same picture has the same tokens

    @property
    def rows(self) -> int:
        """Rows of tokens."""
        return self.grid[0] // self.merge

    @property
    def columns(self) -> int:
        """Tokens in a row."""
        return self.grid[1] // self.merge

    @property
    def tokens(self) -> int:
        """Tokens that the image takes in a prompt."""
        return self.rows * self.columns


def image_patches(
    content: bytes,
    settings: ImageSettings,
    limits: ImageLimits = ImageLimits(),  # noqa: B008 - frozen
    pixels: Pixels | None = None,
) -> ImagePatches:
    """Decode, resize and cut an image file.

    Args:
        pixels: of the file, where it has been decoded.

    Raises:
        RequestError, ResourceError: see `decode_image`.
    """
    resized = resize(pixels or decode_image(content, limits), settings)
    return ImagePatches(
        values=cut(resized, settings),
        grid=(resized.shape[0] // settings.patch, resized.shape[1] // settings.patch),
        merge=settings.merge,
        digest=digest_of(content, settings),
    )


def cut(pixels: Tensor, settings: ImageSettings) -> Tensor:
    """Normalized patches of a resized image.

    Squares that become a token go from left to right and top to bottom, as do the patches in each.

    Args:
        pixels: [height, width, 3] uint8.

    Returns:
        [patches, channels * temporal * patch * patch] float32.
    """
    merge, patch = settings.merge, settings.patch
    height, width, _ = pixels.shape
    rows, columns = height // settings.factor, width // settings.factor
    channels = torch.empty(CHANNELS, height, width, dtype=torch.float32)
    channels.copy_(pixels.permute(2, 0, 1))
    for channel, mean, std in zip(channels, settings.mean, settings.std, strict=True):
        channel.sub_(255 * mean).div_(255 * std)
    squares = channels.view(CHANNELS, rows, merge, patch, columns, merge, patch)
    frame = squares.permute(1, 4, 2, 5, 0, 3, 6)  # [rows, columns, merge, merge, C, patch, patch]
    values = torch.empty(*frame.shape[:5], settings.temporal, patch, patch)
    values.copy_(frame[:, :, :, :, :, None])
    return values.view(rows * columns * merge**2, settings.patch_values)
