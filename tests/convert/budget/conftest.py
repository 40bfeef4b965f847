"""A cache of sensitivities for every test."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(cache: Path) -> None:
    """No test reads what another, or a user, has measured."""
