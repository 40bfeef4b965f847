"""Names of output folders: what cannot be made is found before any work."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lowbit.convert import Recipe
from lowbit.convert.export.export import export
from lowbit.convert.pipeline.output_dir import place_of
from lowbit.formats.errors import ResourceError
from tests.conversions import convert
from tests.convert.fixture_types import Cli

NAMES = {
    "surrogate": "out\udcff",
    "half-pair": "out\ud83d",
    "latin-parent": "caf\udce9/out",
    "nul": "o\0ut",
    "too-long": "o" * 256,
    "too-long-when-partial": "o" * 248,
    "too-long-when-replaced": "o" * 247,
    "too-long-in-bytes": "ö" * 124,
    "long-parent": "d" * 256 + "/out",
    "long-path": "/".join(["d" * 200] * 19) + "/out",
    "below-a-file": "file/out",
    "below-a-pipe": "pipe/out",
    "circle": "circle",
    "below-a-circle": "circle/out",
}
MAKE: dict[str, Callable[[Path, Path], object]] = {
    "convert": convert,
    "export": lambda source, out: export(source, out, "mlx"),
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    return tmp_path


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("name", NAMES)
def test_refused_before_any_work(
    here: Path, monkeypatch: pytest.MonkeyPatch, make: str, name: str
) -> None:
    for step in ("pipeline.estimate.locate", "export.export.open_source"):
        monkeypatch.setattr(f"lowbit.convert.{step}", lambda *_: pytest.fail("work has begun"))
    before = sorted(path.name for path in here.iterdir())
    with pytest.raises(ResourceError) as caught:
        MAKE[make](here / "source", here / NAMES[name])
    str(caught.value).encode()
    assert sorted(path.name for path in here.iterdir()) == before


@pytest.mark.parametrize("name", ["o" * 246, "ö" * 123, "-", "a b", "a\nb", "é", "o.partial"])
def test_names_that_serve(tmp_path: Path, small: Path, name: str) -> None:
    convert(small, tmp_path / name, Recipe())
    assert (tmp_path / name / "lowbit.json").exists()


def test_a_parent_that_may_not_be_written(
    cli: Cli, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    result = cli(small, tmp_path / "a" / "out")
    assert result.exit_code == 1
    assert f"`{tmp_path}` may not be written to" in result.stderr
    assert list(tmp_path.iterdir()) == [small]


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert place_of(tmp_path / "link" / "x" / ".." / "out") == tmp_path / "real" / "out"
