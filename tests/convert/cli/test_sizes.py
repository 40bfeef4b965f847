"""One size of a folder: the bytes of its files, reports and cards aside, whoever states it."""

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lowbit.convert.measure.record import read_quality
from lowbit.formats.folder_size import folder_bytes

if TYPE_CHECKING:
    from click.testing import Result

    from tests.convert.conftest import Cli
    from tests.hub_server import HubServer

REPORTS = ("quality.json", "quality.html", "tasks.json", "bench.json", "README.md", "MODEL_CARD.md")


def du(folder: Path) -> int:
    """Bytes of all files, those of reports and cards aside."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files if path.name not in REPORTS)


def parsed(done: "Result") -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    content: dict[str, Any] = json.loads(done.stdout)
    return content


@pytest.mark.commands
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("short", ()),
        ("short", ("--frequent-rows", "100", "--method", "rtn")),
        ("short_hybrid", ("--draft-vocabulary", "300", "--max-shard-size", "900kB")),
        ("readable", ("--method", "gptq", "--calib-samples", "2", "--calib-length", "32")),
    ],
)
def test_every_command_states_the_same_size(
    cli: "Cli",
    hub: "HubServer",
    tmp_path: Path,
    request: pytest.FixtureRequest,
    model: str,
    options: tuple[str, ...],
) -> None:
    source = Path(shutil.copytree(request.getfixturevalue(model), tmp_path / "source"))
    (source / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (source / "LICENSE").write_text("MIT")
    out = tmp_path / "out"
    given = options if "--method" in options else (*options, "--method", "rtn")
    planned = parsed(cli("plan", source, *given, "--device", "cpu", "--json"))
    done = parsed(cli(source, out, *options, "--json"))
    assert (out / "quality.html").exists()
    size = du(out)
    assert size < sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert done["quality"]["sizes"]["folder_bytes"] == size
    report = read_quality(out)
    assert report is not None
    assert report.sizes.folder_bytes == size
    assert parsed(cli("verify", out, "--json"))["size_bytes"] == size
    inspected = parsed(cli("inspect", out, "--json"))
    assert inspected["folder_bytes"] == size
    hub.add("org/out", out)
    assert parsed(cli("inspect", "org/out", "--json"))["folder_bytes"] == size
    scales = sum(row["scale_min"] is not None for row in inspected["modules"])
    # Digits of the scales' ranges, of a draft head's shares, of a calibration's windows.
    assert abs(planned["folder_bytes"] - size) <= 12 * scales + 12
    if model != "short":
        return
    shown = cli("plan", source, *given, "--device", "cpu").stdout
    before = re.search(r"^([\d.]+ .B) → ([\d.]+ .B), ", shown, re.MULTILINE)
    assert before is not None
    assert report.sizes.source_bytes is not None
    assert before[1] == f"{report.sizes.source_bytes / 1e6:.2f} MB"


def test_what_counts(tmp_path: Path) -> None:
    files = {
        "config.json": 10,
        "draft/head.safetensors": 200,
        "notes/more/deep.txt": 3000,
        ".hidden": 40_000,
        **dict.fromkeys(REPORTS, 500_000),
        ".quality.html.4711.partial": 500_000,
        "notes/README.md": 6_000_000,
    }
    for name, size in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    (tmp_path / "link.json").symlink_to(tmp_path / "config.json")
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert folder_bytes(tmp_path) == 6_043_220
    assert folder_bytes(tmp_path / "none") == 0
