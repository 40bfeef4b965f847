"""Fixtures: a packed folder of several shards, a token that may write, retries without waits."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lowbit.convert.plan.recipe import Recipe
from tests.conversions import convert

if TYPE_CHECKING:
    from tests.convert.conftest import MakeModel
    from tests.hub_server import HubServer

CARD = (
    "---\nlicense: apache-2.0\nlanguage:\n- en\n- de\npipeline_tag: text-generation\n---\n# Big\n"
)
SHARD_BYTES = 150_000

Pack = Callable[..., Path]


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory, make_model: "MakeModel") -> Pack:
    """Convert a small model with a card: (options of `convert`)."""
    source = make_model(tmp_path_factory.mktemp("publish") / "source")
    (source / "README.md").write_text(CARD)

    def make(recipe: Recipe | None = None, **options: Any) -> Path:
        out = tmp_path_factory.mktemp("publish") / "small-int4"
        convert(source, out, recipe or Recipe(), **{"max_shard_bytes": SHARD_BYTES, **options})
        return out

    return make


@pytest.fixture(scope="session")
def pristine(pack: Pack) -> Path:
    """A packed folder of three shards; not to be written to."""
    return pack()


@pytest.fixture
def packed(pristine: Path, tmp_path: Path) -> Path:
    """A copy of `pristine` that a test may change."""
    return Path(shutil.copytree(pristine, tmp_path / "small-int4"))


@pytest.fixture
def writer(hub: "HubServer", monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that may write to the hub, and no waiting between tries."""
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
