"""A small model with a tokenizer, a short text, and a cache of their own."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.convert.conftest import MakeModel


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads what another, or a user, has measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def readable(tmp_path_factory: pytest.TempPathFactory, make_model: "MakeModel", tiny: Path) -> Path:
    """A random tied model of two layers with the bundled model's tokenizer."""
    folder = make_model(
        tmp_path_factory.mktemp("budget") / "readable",
        vocab_size=4096,
        tie_word_embeddings=True,
    )
    shutil.copy(tiny / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="session")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few sentences."""
    path = tmp_path_factory.mktemp("budget") / "short.txt"
    path.write_text("Once upon a time there was a little robot who lived by the sea. " * 4)
    return path
