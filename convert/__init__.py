"""Checkpoint to packed checkpoint and quality report."""

from lowbit.convert.conversion import Conversion, convert
from lowbit.convert.recipe import Override, Recipe
from lowbit.formats.errors import LowbitError

__all__ = ["Conversion", "LowbitError", "Override", "Recipe", "convert"]
