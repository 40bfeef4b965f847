"""A conversion cut off at any moment leaves nothing at OUT, and the next run continues it."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from lowbit.convert import Conversion, Recipe
from lowbit.convert.pipeline.journal import JOURNAL_FILE
from lowbit.convert.plan.method import ABSMAX
from lowbit.formats.errors import QuantizationError, ResourceError
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert
from tests.convert.fixture_types import Hashes, MakeModel

pytestmark = pytest.mark.commands

SHARD_BYTES = 200_000
STEPS = 2 * 11 + 3

# Each conversion runs in a forked child that kills itself, one child at a time: torch is imported
# once. Blocks are small, so that the kill falls inside tensors.
KILLER = """
import json, os, signal, sys
from pathlib import Path
from lowbit.convert import Recipe, Request, convert
from lowbit.convert.pipeline import conversion

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def run(source, out, shard_bytes, phase, count, overwrite):
    conversion.block_elements = lambda *_: 6000
    left = count
    def progress(now, done, total):
        nonlocal left
        if now == phase:
            left -= 1
            if not left:
                kill()
    if phase == "rename":
        rename = Path.rename
        def rename_or_die(self, target):
            nonlocal left
            left -= 1
            return rename(self, target) if left else kill()
        Path.rename = rename_or_die
    if phase == "unlink":
        Path.unlink = kill
    request = Request(Recipe(), max_shard_bytes=shard_bytes, overwrite=overwrite)
    convert(source, out, request, on_progress=progress)

for arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        try:
            run(*arguments)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

KILLS: dict[str, tuple[str, int, bool]] = {  # phase, how often it is reached, overwrite
    "first-block": ("convert", 1, False),
    "early": ("convert", 20, False),
    "late": ("convert", 75, False),
    "verifying": ("verify", 3, False),
    "before-rename": ("rename", 1, False),
    "between-renames": ("rename", 2, True),
    "after-rename": ("unlink", 1, False),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Path:
    return make_model(tmp_path_factory.mktemp("resume") / "source")


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same conversion, never interrupted."""
    return again(source, tmp_path_factory.mktemp("whole") / "out").folder


def again(source: Path, out: Path, **options: Any) -> Conversion:
    return convert(source, out, **{"recipe": Recipe(), "max_shard_bytes": SHARD_BYTES, **options})


@pytest.fixture(scope="module")
def killed(source: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what every kill left behind."""
    folder = tmp_path_factory.mktemp("killed")
    again(source, folder / "between-renames", recipe=Recipe(method=ABSMAX))
    runs = [(str(source), str(folder / name), SHARD_BYTES, *kill) for name, kill in KILLS.items()]
    done = subprocess.run(
        [sys.executable, "-c", KILLER, json.dumps(runs)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(runs), done.stderr
    return folder


def partial_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def journaled(out: Path) -> int:
    """Steps that the journal of an unfinished conversion holds."""
    lines = (partial_of(out) / JOURNAL_FILE).read_bytes().split(b"\n")
    return len(lines) - 2


def interrupt(source: Path, out: Path, phase: str, count: int, **options: Any) -> int:
    """Stop a conversion by Ctrl-C; the number of steps it finished."""

    def progress(now: str, done: int, total: int) -> None:
        nonlocal count
        count -= now == phase
        if not count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again(source, out, progress=progress, **options)
    assert not out.exists()
    return journaled(out)


def assert_whole(done: Conversion, whole: Path, hashes: Hashes) -> None:
    assert hashes(done.folder) == hashes(whole)
    assert not partial_of(done.folder).exists()
    assert not done.folder.with_name(f"{done.folder.name}.replaced").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KILLS if name != "after-rename"])
def test_killed(source: Path, killed: Path, whole: Path, hashes: Hashes, name: str) -> None:
    out = killed / name
    assert not out.exists()
    held = journaled(out)
    if KILLS[name][0] != "convert":
        assert held == STEPS
    elif name == "late":
        assert 0 < held < STEPS
    done = again(source, out, overwrite=KILLS[name][2])
    assert done.resumed == held
    assert len(done.weights) == 15
    assert_whole(done, whole, hashes)


@pytest.mark.slow
def test_killed_after_the_rename(source: Path, killed: Path, whole: Path, hashes: Hashes) -> None:
    out = killed / "after-rename"
    assert {name: digest for name, digest in hashes(out).items() if name != JOURNAL_FILE} == (
        hashes(whole)
    )
    with pytest.raises(ResourceError, match="is not empty"):
        again(source, out)
    assert_whole(again(source, out, overwrite=True), whole, hashes)


@pytest.mark.parametrize("phase", ["convert", "verify"])
def test_interrupted_by_the_keyboard(
    source: Path, tmp_path: Path, whole: Path, hashes: Hashes, phase: str
) -> None:
    held = interrupt(source, tmp_path / "out", phase, 5)
    done = again(source, tmp_path / "out")
    assert done.resumed == held
    assert_whole(done, whole, hashes)


def test_interrupted_twice(source: Path, tmp_path: Path, whole: Path, hashes: Hashes) -> None:
    first = interrupt(source, tmp_path / "out", "convert", 8)
    second = interrupt(source, tmp_path / "out", "convert", 8)
    assert first < second
    done = again(source, tmp_path / "out")
    assert done.resumed == second
    assert_whole(done, whole, hashes)


def tear(lines: list[bytes]) -> list[bytes]:
    return [*lines[:-1], lines[-1][:-20]]


def blank(lines: list[bytes]) -> list[bytes]:
    """What a power failure can leave: a line of zeros where the last one was to be."""
    return [*lines[:-1], bytes(len(lines[-1]) - 1) + b"\n"]


def mangle_middle(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], b'{"step": 3}\n', *lines[5:]]


def mangle_first(lines: list[bytes]) -> list[bytes]:
    return [b"\xff\xfe not JSON\n", *lines[1:]]


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (tear, STEPS - 1),
        (blank, STEPS - 1),
        (mangle_middle, 3),
        (mangle_first, 0),
        (lambda lines: [], 0),
    ],
    ids=["torn", "blank", "middle", "first", "empty"],
)
def test_damaged_journal(
    source: Path,
    tmp_path: Path,
    whole: Path,
    hashes: Hashes,
    damage: Callable[[list[bytes]], list[bytes]],
    kept: int,
) -> None:
    out = tmp_path / "out"
    assert interrupt(source, out, "verify", 1) == STEPS
    journal = partial_of(out) / JOURNAL_FILE
    with journal.open("rb") as file:
        lines = file.readlines()
    journal.write_bytes(b"".join(damage(lines)))
    # Interrupted once more, the journal is whole again.
    assert interrupt(source, out, "verify", 1) == STEPS
    done = again(source, out)
    assert done.resumed == STEPS
    assert_whole(done, whole, hashes)
    assert interrupt(source, tmp_path / "other", "verify", 1) == STEPS
    journal = partial_of(tmp_path / "other") / JOURNAL_FILE
    journal.write_bytes(b"".join(damage(lines)))
    done = again(source, tmp_path / "other")
    assert done.resumed == kept
    assert_whole(done, whole, hashes)


def test_changed_recipe_asks_before_it_starts_over(
    source: Path, tmp_path: Path, whole: Path, hashes: Hashes
) -> None:
    interrupt(source, tmp_path / "out", "verify", 1, recipe=Recipe(method=ABSMAX))
    kept = (partial_of(tmp_path / "out") / JOURNAL_FILE).read_bytes()
    with pytest.raises(ResourceError, match="another recipe or source"):
        again(source, tmp_path / "out")
    assert (partial_of(tmp_path / "out") / JOURNAL_FILE).read_bytes() == kept
    done = again(source, tmp_path / "out", overwrite=True)
    assert done.resumed == 0
    assert_whole(done, whole, hashes)


def test_other_shard_size_leaves_no_index_behind(
    source: Path, tmp_path: Path, hashes: Hashes
) -> None:
    interrupt(source, tmp_path / "out", "verify", 1)
    assert (partial_of(tmp_path / "out") / "model.safetensors.index.json").exists()
    done = again(source, tmp_path / "out", max_shard_bytes=1 << 30, overwrite=True)
    assert done.resumed == 0
    assert set(hashes(done.folder)) == {
        *("config.json", "generation_config.json", "lowbit.json", "model.safetensors")
    }


def test_changed_source_tensor_is_done_again(tmp_path: Path, small: Path, hashes: Hashes) -> None:
    interrupt(small, tmp_path / "out", "verify", 1)
    name = "model.layers.1.mlp.up_proj.weight"
    info = open_checkpoint(small).tensors[name]
    with (small / info.file).open("r+b") as file:
        file.seek(info.offset + 101)
        file.write(b"\x3c")
    fresh = again(small, tmp_path / "fresh")
    done = again(small, tmp_path / "out")
    assert done.resumed == STEPS - 1
    assert_whole(done, fresh.folder, hashes)


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "weight_shape"])
def test_damaged_partial_shard_is_done_again(
    source: Path, tmp_path: Path, whole: Path, hashes: Hashes, suffix: str
) -> None:
    interrupt(source, tmp_path / "out", "verify", 1)
    name = f"model.layers.0.self_attn.q_proj.{suffix}"
    info = open_checkpoint(whole).tensors[name]
    with (partial_of(tmp_path / "out") / info.file).open("r+b") as file:
        file.seek(info.offset + 3)
        byte = file.read(1)[0]
        file.seek(info.offset + 3)
        file.write(bytes([byte ^ 1]))
    done = again(source, tmp_path / "out")
    assert done.resumed == STEPS - 1
    assert_whole(done, whole, hashes)


def test_removed_partial_shard_is_made_again(
    source: Path, tmp_path: Path, whole: Path, hashes: Hashes
) -> None:
    interrupt(source, tmp_path / "out", "verify", 1)
    shard = min(partial_of(tmp_path / "out").glob("*.safetensors"))
    with safe_open(shard, "pt") as file:
        lost = {name.rpartition(".")[0] for name in file.keys()}  # noqa: SIM118
    shard.unlink()
    done = again(source, tmp_path / "out")
    assert STEPS - len(lost) <= done.resumed < STEPS
    assert_whole(done, whole, hashes)


def test_two_conversions_at_once(source: Path, tmp_path: Path, whole: Path, hashes: Hashes) -> None:
    refused: list[ResourceError] = []

    def progress(phase: str, done: int, total: int) -> None:
        if not refused:
            with pytest.raises(ResourceError, match="another conversion is writing to") as caught:
                again(source, tmp_path / "out")
            refused.append(caught.value)

    assert_whole(again(source, tmp_path / "out", progress=progress), whole, hashes)
    assert refused[0].hint is not None


def test_something_appears_at_out_meanwhile(
    source: Path, tmp_path: Path, whole: Path, hashes: Hashes
) -> None:
    out = tmp_path / "out"

    def progress(phase: str, done: int, total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "notes.txt").write_text("mine")

    with pytest.raises(ResourceError, match="is not empty"):
        again(source, out, progress=progress)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    (out / "notes.txt").unlink()
    done = again(source, out)
    assert done.resumed == STEPS
    assert_whole(done, whole, hashes)


def test_repaired_source_continues(tmp_path: Path, small: Path, hashes: Hashes) -> None:
    fresh = again(small, tmp_path / "fresh")
    info = open_checkpoint(small).tensors["model.norm.weight"]
    path = small / info.file
    good = path.read_bytes()
    path.write_bytes(good[: info.offset] + b"\xc0\x7f" + good[info.offset + 2 :])
    with pytest.raises(QuantizationError, match=r"`model.norm.weight` holds 1 NaN"):
        again(small, tmp_path / "out")
    held = journaled(tmp_path / "out")
    assert held > 0
    path.write_bytes(good)
    done = again(small, tmp_path / "out")
    assert done.resumed == held
    assert_whole(done, fresh.folder, hashes)
