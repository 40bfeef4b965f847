"""Checkpoint to packed checkpoint and quality report.

What needs torch is imported when it is first asked for, so that `lowbit-convert --help` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowbit.formats.errors import LowbitError

if TYPE_CHECKING:
    from lowbit.convert.api import ReportRequest, Request, Result, convert
    from lowbit.convert.pipeline.conversion import Conversion
    from lowbit.convert.plan.recipe import Override, Recipe
    from lowbit.convert.vocabulary.cut import CutRequest, cut_vocabulary

__all__ = [
    "Conversion",
    "CutRequest",
    "LowbitError",
    "Override",
    "Recipe",
    "ReportRequest",
    "Request",
    "Result",
    "convert",
    "cut_vocabulary",
]

_HOMES = {
    "Conversion": "pipeline.conversion",
    "CutRequest": "vocabulary.cut",
    "Override": "plan.recipe",
    "Recipe": "plan.recipe",
    "ReportRequest": "api",
    "Request": "api",
    "Result": "api",
    "convert": "api",
    "cut_vocabulary": "vocabulary.cut",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
