"""A command plans once, and opens a folder once, however many parts of it look into them."""

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lowbit.formats.files import reading
from lowbit.formats.layout.manifest import MANIFEST_FILE

if TYPE_CHECKING:
    from tests.convert.conftest import Cli

MANIFEST = "lowbit.formats.layout.manifest.parse_object"
HEADERS = "lowbit.formats.safetensors.checkpoint.read_header"
PLAN = "lowbit.convert.plan.plan._steps"  # the fate of every tensor
TEXT = "Once upon a time there was a little robot who lived in a big house by the sea. " * 4


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of the functions above, by their name, and openings of lowbit.json."""
    found: Counter[str] = Counter()

    def count(target: str) -> None:
        module, _, name = target.rpartition(".")
        function: Callable[..., Any] = getattr(__import__(module, fromlist=[name]), name)

        def counting(*args: Any, **options: Any) -> Any:
            found[target] += 1
            return function(*args, **options)

        monkeypatch.setattr(target, counting)

    for target in (MANIFEST, HEADERS, PLAN):
        count(target)
    real = reading.reopen

    def counted(path: Path) -> io.BufferedReader:
        found[MANIFEST_FILE] += path.name == MANIFEST_FILE
        return real(path)

    monkeypatch.setattr(reading, "reopen", counted)
    return found


@pytest.fixture
def packed(cli: "Cli", short: Path, tmp_path: Path) -> Path:
    assert cli(short, tmp_path / "packed").exit_code == 0
    return tmp_path / "packed"


@pytest.mark.parametrize(
    ("words", "plans", "manifests", "opened", "folders"),
    [
        (("quantize", "SRC", "OUT", "--report", "--eval-text", "TEXT"), 1, 1, 1, 2),
        (("quantize", "SRC", "OUT", "--method", "auto", "--calib", "TEXT"), 1, 1, 1, 2),
        (("plan", "SRC"), 1, 0, 0, 1),
        (("report", "DIR", "--source", "SRC", "--eval-text", "TEXT"), 0, 1, 1, 2),
        (("verify", "DIR", "--source", "SRC"), 1, 1, 1, 2),
        (("compare", "DIR", "DIR", "--diff"), 0, 2, 2, 2),
        (("push", "DIR", "me/model", "--dry-run"), 0, 1, 3, 1),  # hashed, and searched for paths
        (("export", "DIR", "OUT", "--to", "mlx"), 0, 1, 1, 2),  # read back
        (("inspect", "DIR"), 0, 1, 1, 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_everything_is_opened_once(
    cli: "Cli",
    counts: Counter[str],
    short: Path,
    packed: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    plans: int,
    manifests: int,
    opened: int,
    folders: int,
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    paths = {"SRC": short, "DIR": packed, "OUT": tmp_path / "out", "TEXT": text}
    counts.clear()
    result = cli(*(paths.get(word, word) for word in words))
    assert result.exit_code == 0, result.output
    found = (counts[PLAN], counts[MANIFEST], counts[MANIFEST_FILE], counts[HEADERS])
    assert found == (plans, manifests, opened, folders)
