"""Patches of an image: the vision tower's input, in the order in which tokens are merged."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.image_settings import CHANNELS, ImageSettings
from lowbit.runtime.images.decode import ImageLimits, decode_image
from lowbit.runtime.images.pixels import Pixels
from lowbit.runtime.images.resize import resize

# Most bytes of an image that are page-locked on their way to a GPU: `auto` allows fewer. PyTorch
# keeps such memory, and page-locks a new megabyte in half a millisecond.
MOST_LOCKED = 8 << 20


@dataclass(frozen=True, slots=True)
class ImagePatches:
    """An image that has been resized; `merge * merge` patches become one token.

    It stays in bytes until the tower takes it: a quarter of the tower's numbers in BF16, which are
    cut on the tower's device.
    """

    pixels: Tensor  # [height, width, 3] uint8; both sides are multiples of `settings.factor`
    settings: ImageSettings

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches, multiples of `merge`."""
        height, width, _ = self.pixels.shape
        return height // self.settings.patch, width // self.settings.patch

    @property
    def count(self) -> int:
        """Number of patches."""
        return self.grid[0] * self.grid[1]

    @property
    def rows(self) -> int:
        """Rows of tokens."""
        return self.grid[0] // self.settings.merge

    @property
    def columns(self) -> int:
        """Tokens in a row."""
        return self.grid[1] // self.settings.merge

    @property
    def tokens(self) -> int:
        """Tokens that the image takes in a prompt."""
        return self.rows * self.columns

    def values(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Normalized patches, cut on a device; see `cut`.

        Only a copy from page-locked memory lets the host go on while a GPU works on other things.
        """
        pixels = self.pixels
        if torch.device(device).type == "cuda" and pixels.is_cpu and pixels.nbytes <= MOST_LOCKED:
            pixels = _locked(pixels)
        return cut(pixels.to(device, non_blocking=True), self.settings, dtype)


def _locked(pixels: Tensor) -> Tensor:
    """A copy in page-locked memory; the pixels themselves where the system refuses it."""
    try:
        return pixels.pin_memory()
    except RuntimeError:  # of CUDA: a limit on what may be locked
        return pixels


def image_patches(
    source: bytes | Pixels,
    settings: ImageSettings,
    limits: ImageLimits = ImageLimits(),  # noqa: B008 - frozen
) -> ImagePatches:
    """Decode and resize an image file, or resize the pixels of one that has been decoded.

    Raises:
        RequestError, ResourceError: see `decode_image`.
    """
    image = source if isinstance(source, Pixels) else decode_image(source, limits)
    return ImagePatches(resize(image, settings), settings)


def cut(pixels: Tensor, settings: ImageSettings, dtype: torch.dtype) -> Tensor:
    """Normalized patches of a resized image, on its device.

    Squares that become a token go from left to right and top to bottom, as do the patches in each.

    Args:
        pixels: [height, width, 3] uint8.

    Returns:
        [patches, channels * temporal * patch * patch] `dtype`, rounded from float32.
    """
    merge, patch = settings.merge, settings.patch
    height, width, _ = pixels.shape
    rows, columns = height // settings.factor, width // settings.factor
    # Tensors, since a GPU multiplies by the rounded inverse of a number instead of dividing.
    mean, std = (
        torch.tensor([255 * x for x in each], dtype=torch.float32).to(
            pixels.device, non_blocking=True
        )
        for each in (settings.mean, settings.std)
    )
    channels = pixels.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format)
    channels = channels.sub_(mean[:, None, None]).div_(std[:, None, None]).to(dtype)
    squares = channels.view(CHANNELS, rows, merge, patch, columns, merge, patch)
    frame = squares.permute(1, 4, 2, 5, 0, 3, 6)  # [rows, columns, merge, merge, C, patch, patch]
    values = frame.new_empty(*frame.shape[:5], settings.temporal, patch, patch)
    values.copy_(frame[:, :, :, :, :, None])
    return values.view(rows * columns * merge**2, settings.patch_values)
