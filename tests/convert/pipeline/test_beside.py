"""Layers written while others are calibrated: the same files, and the same ends."""

import errno
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.convert import Conversion, Recipe
from lowbit.convert.pipeline import beside, conversion, stream
from lowbit.convert.pipeline.journal import JOURNAL_FILE
from lowbit.convert.pipeline.output_dir import partial_of
from lowbit.convert.plan.memory import Memory
from lowbit.convert.plan.method import Method
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.formats.errors import ResourceError
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import STORY, convert
from tests.convert.fixture_types import Hashes

OTHERS, OF_LAYER = 10, 7  # steps: embedding and norms, which no codes change; linears of a layer
UNCHANGED = 5  # linears of the first layer whose codes do not follow from its up_proj


class _Inline:
    """Threads that do all work at once where it is handed to them."""

    def __init__(self, *_: object) -> None:
        """No thread to begin."""

    def submit(self, call: Callable[..., Any], *given: Any) -> "Future[Any]":
        """Do it now."""
        done: Future[Any] = Future()
        try:
            done.set_result(call(*given))
        except BaseException as error:
            done.set_exception(error)
        return done

    def shutdown(self, **_: object) -> None:
        """Nothing waits."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(STORY * 30)
    return path


@pytest.fixture(scope="module")
def whole(
    readable: Path, text: Path, hashes: Hashes, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Hashes of a conversion that writes when all is calibrated."""
    return hashes(made(readable, tmp_path_factory.mktemp("whole") / "out", text).folder)


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write beside the calibration, as on a GPU."""
    monkeypatch.setattr(conversion, "hides_writing", lambda *_: True)


@pytest.fixture
def inline(hidden: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write each layer before the next one begins."""
    monkeypatch.setattr(beside, "ThreadPoolExecutor", _Inline)


def made(source: Path, out: Path, text: Path, **options: Any) -> Conversion:
    recipe = Recipe(method=Method.parse("gptq+rotate"))
    return convert(source, out, recipe, calibration=CalibrationRequest(text, 4, 32), **options)


def journaled(out: Path) -> int:
    return (partial_of(out) / JOURNAL_FILE).read_bytes().count(b'"step"')


def test_same_files(
    hidden: None, readable: Path, text: Path, whole: dict[str, str], hashes: Hashes, tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int]] = []
    done = made(readable, tmp_path / "out", text, progress=lambda *step: seen.append(step))
    assert hashes(done.folder) == whole
    phases = list(dict.fromkeys(phase for phase, *_ in seen))
    assert phases.index("convert") > phases.index("calibrate")
    written = [(bytes_, total) for phase, bytes_, total in seen if phase == "convert"]
    assert written == sorted(written)
    assert written[-1][0] == written[-1][1]


@pytest.mark.gpu
def test_same_files_from_a_gpu(
    tiny: Path, text: Path, hashes: Hashes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for beside_it in (True, False):
        monkeypatch.setattr(conversion, "hides_writing", lambda *_, it=beside_it: it)
        done = made(tiny, tmp_path / f"out-{beside_it}", text, device="cuda")
        found.append(hashes(done.folder))
    assert found[0] == found[1]


def test_layers_are_written_as_they_are_finished(
    inline: None, readable: Path, text: Path, tmp_path: Path
) -> None:
    counts: list[int] = []

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "calibrate":
            counts.append(journaled(tmp_path / "out"))

    made(readable, tmp_path / "out", text, progress=progress)
    # The first layer's file is written while the second is chosen, and awaited behind it.
    assert counts[0] == OTHERS
    assert counts[-1] == OTHERS + 2 * OF_LAYER


@pytest.mark.commands  # `test_bad_input` has full disks
def test_a_full_disk_ends_it_as_ever(
    hidden: None,
    readable: Path,
    text: Path,
    whole: dict[str, str],
    hashes: Hashes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(stream, "write_at", full)
        with pytest.raises(ResourceError, match="No space left") as caught:
            made(readable, out, text)
    assert caught.value.hint == conversion.AGAIN
    assert not out.exists()
    assert hashes(made(readable, out, text).folder) == whole


@pytest.mark.parametrize("phase", ["calibrate", "convert"])
def test_interrupted_it_goes_on(
    inline: None,
    readable: Path,
    text: Path,
    whole: dict[str, str],
    hashes: Hashes,
    tmp_path: Path,
    phase: str,
) -> None:
    out = tmp_path / "out"

    def stop(now: str, done: int, total: int) -> None:
        if now == phase and done >= total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="finished tensors are kept"):
        made(readable, out, text, progress=stop)
    assert not out.exists()
    assert (kept := journaled(out)) >= OTHERS
    done = made(readable, out, text)
    assert done.resumed == kept
    assert hashes(out) == whole


def clear_half_of_up_proj(source: Path) -> None:
    """Change a weight of a checkpoint's first layer."""
    info = open_checkpoint(source).tensors["model.layers.0.mlp.up_proj.weight"]
    with (source / info.file).open("r+b") as file:
        file.seek(info.offset)
        file.write(bytes(info.nbytes // 2))


def test_codes_that_follow_from_other_weights_are_written_again(
    inline: None, readable: Path, text: Path, hashes: Hashes, tmp_path: Path
) -> None:
    """A changed first layer changes the second's codes, whose own weights have not changed."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(readable, source)

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "verify":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(source, out, text, progress=stop)
    clear_half_of_up_proj(source)
    fresh = hashes(made(source, tmp_path / "fresh", text).folder)
    done = made(source, out, text)
    assert done.resumed == OTHERS + UNCHANGED
    assert hashes(out) == fresh


@pytest.mark.commands  # those of one run are tested above
def test_codes_of_an_interrupted_run_between_are_written(
    readable: Path, text: Path, hashes: Hashes, tmp_path: Path
) -> None:
    """The run that chose the newest codes may end before it writes them, or learns of old ones."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(readable, source)
    for last in ("verify", "convert"):

        def stop(phase: str, done: int, total: int, last: str = last) -> None:
            if phase == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            made(source, out, text, progress=stop)
        clear_half_of_up_proj(source)
    fresh = hashes(made(source, tmp_path / "fresh", text).folder)
    done = made(source, out, text)
    assert done.resumed == OTHERS + UNCHANGED
    assert hashes(out) == fresh


def test_only_where_both_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, if its memory and the machine's hold the calibration and the writing."""
    gpu, calibration = torch.device("cuda"), Memory(100, 200, 1)
    monkeypatch.setattr(beside, "free_bytes", {"cpu": 110, "cuda": 230}.get)
    assert beside.hides_writing(gpu, calibration, Memory(10, 30, 0))
    assert not beside.hides_writing(gpu, calibration, Memory(11, 30, 0))
    assert not beside.hides_writing(gpu, calibration, Memory(10, 31, 0))
    assert not beside.hides_writing(torch.device("cpu"), calibration, Memory(0, 0, 0))
