"""Checkpoint to packed checkpoint and quality report."""

from lowbit.convert.conversion import Conversion, convert
from lowbit.convert.recipe import Override, Recipe

__all__ = ["Conversion", "Override", "Recipe", "convert"]
