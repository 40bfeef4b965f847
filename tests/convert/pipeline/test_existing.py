"""A command killed after its conversion goes on with the report, and with nothing else."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from lowbit.convert.measure.measure import Measured, measure_logits
from lowbit.convert.measure.pair import Pair
from lowbit.convert.measure.record import read_quality
from lowbit.convert.pipeline import folder
from lowbit.convert.report import reporting
from lowbit.formats.files import atomic
from tests.convert.fixture_types import MakeModel

STORY = "Once upon a time there was a little robot who lived in a big house by the sea. "

Patch = pytest.MonkeyPatch
Kill = Callable[[Patch], None]


class Killed(Exception):  # noqa: N818 - stands for SIGKILL: nothing here catches it
    pass


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel, tiny: Path) -> Path:
    """A folder with `source` and a text to evaluate on."""
    made = tmp_path_factory.mktemp("finished")
    source = make_model(made / "source", num_hidden_layers=1, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny / name, source / name)
    (made / "story.txt").write_text(STORY * 8)
    return made


@pytest.fixture(scope="module")
def arguments(here: Path) -> list[str]:
    return ["--report", "--eval-text", str(here / "story.txt")]


@pytest.fixture(scope="module")
def whole(here: Path, arguments: list[str]) -> Path:
    """The same command, never interrupted."""
    run(here / "source", here / "whole" / "out", *arguments)
    return here / "whole" / "out"


def run(source: Path, out: Path, *arguments: str) -> Result:
    from click.testing import CliRunner

    from lowbit.convert.cli.main import main

    method = [] if "--method" in arguments else ["--method", "rtn"]
    return CliRunner().invoke(main, [str(source), str(out), *arguments, *method])


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def kill_after_the_rename(patch: Patch) -> None:
    def die(*_: object) -> None:
        raise Killed

    patch.setattr(folder, "finish", die)


def kill_at_file(number: int) -> Kill:
    """While a report file of that number is written: three without logits, three with them."""

    def kill(patch: Patch) -> None:
        write, calls = atomic.write_synced, iter(range(100))

        def write_or_die(path: Path, content: bytes, mode: int = 0o666) -> None:
            if next(calls) == number:
                path.write_bytes(content[:100])
                raise Killed
            write(path, content)

        patch.setattr(atomic, "write_synced", write_or_die)
        patch.setattr(atomic, "_remove", lambda path: None)  # as where the process is gone

    return kill


def kill_while_measuring(share: float) -> Kill:
    def kill(patch: Patch) -> None:
        def measure_or_die(pair: Pair, texts: Any, device: str, _: object, *rest: Any) -> Measured:
            def progress(_: str, done: int, total: int) -> None:
                if done >= share * total:
                    raise Killed

            return measure_logits(pair, texts, device, progress, *rest)

        patch.setattr(reporting, "measure_logits", measure_or_die)

    return kill


KILLS: dict[str, Kill] = {
    "after-rename": kill_after_the_rename,
    **{f"file-{number}": kill_at_file(number) for number in (0, 3, 5)},
    **{f"measuring-{share}": kill_while_measuring(share) for share in (0.5,)},
}


@contextmanager
def only_a_report(patch: Patch) -> Iterator[None]:
    """Fail where anything is quantized again."""
    with patch.context() as inner:
        inner.setattr(
            "lowbit.convert.pipeline.conversion.stream", lambda *_: pytest.fail("converted again")
        )
        yield


@pytest.fixture
def killed(here: Path, arguments: list[str], tmp_path: Path, whole: Path) -> Path:
    """A packed folder whose report was interrupted."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    report = read_quality(out)
    assert report is not None
    (out / "quality.json").write_bytes(replace(report, logits=None).to_bytes())
    return out


@pytest.mark.commands
@pytest.mark.parametrize(
    ("name", "overwrite"),
    [*((name, False) for name in KILLS), ("file-5", True)],
)
def test_the_same_command_goes_on(
    here: Path,
    arguments: list[str],
    whole: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    name: str,
    overwrite: bool,
) -> None:
    out = tmp_path / "out"
    options = [*arguments, *(["--overwrite"] if overwrite else [])]
    with monkeypatch.context() as patch:
        KILLS[name](patch)
        assert isinstance(run(here / "source", out, *options).exception, Killed)
    assert (out / "lowbit.json").exists()
    with only_a_report(monkeypatch):
        done = run(here / "source", out, *options, "--json")
    assert done.exit_code == 0, done.output
    assert content(out) == content(whole)
    assert json.loads(done.stdout)["quality"] == json.loads((whole / "quality.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_logits_the_weights_are_reported(
    here: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    whole, out = tmp_path / "whole" / "out", tmp_path / "killed" / "out"
    assert run(here / "source", whole).exit_code == 0
    with monkeypatch.context() as patch:
        kill_at_file(0)(patch)
        assert isinstance(run(here / "source", out).exception, Killed)
    with only_a_report(monkeypatch):
        done = run(here / "source", out)
    assert done.exit_code == 0
    assert f"{out} was there already, checked in " in done.stdout.replace("\n", " ")
    assert content(out) == content(whole)


@pytest.mark.commands
def test_a_calibrated_conversion(here: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    options = ["--report", "--eval-text", str(here / "story.txt"), "--method", "gptq"]
    options += ["--calib", str(here / "story.txt"), "--calib-samples", "2", "--calib-length", "32"]
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        kill_while_measuring(0)(patch)
        assert isinstance(run(here / "source", out, *options).exception, Killed)
    before = content(out)
    options[-1] = "31"
    assert "is not empty" in run(here / "source", out, *options).stderr
    assert content(out) == before
    options[-1] = "32"
    with only_a_report(monkeypatch):
        done = run(here / "source", out, *options)
    assert done.exit_code == 0, done.output
    assert json.loads((out / "quality.json").read_text())["logits"] is not None


@pytest.mark.commands
def test_ctrl_c_while_measuring_says_how_to_go_on(
    here: Path, arguments: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reporting, "measure_logits", stop)
    done = run(here / "source", tmp_path / "out", *arguments)
    assert done.exit_code != 0
    assert "out` is whole, and the same command goes on with its report" in done.stderr


def edit_source(source: Path, out: Path) -> None:
    path = source / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def edit_small_file(source: Path, out: Path) -> None:
    (source / "generation_config.json").write_text('{"do_sample": true}')


def add_small_file(source: Path, out: Path) -> None:
    (source / "LICENSE").write_text("new")


def edit_config(source: Path, out: Path) -> None:
    path = source / "config.json"
    path.write_text(path.read_text().replace("512", "256"))


def damage_weights(source: Path, out: Path) -> None:
    edit_source(out, out)


def damage_small_file(source: Path, out: Path) -> None:
    (out / "tokenizer_config.json").write_text("{}")


def other_release(source: Path, out: Path) -> None:
    path = out / "lowbit.json"
    path.write_text(path.read_text().replace('"lowbit_version": "', '"lowbit_version": "9'))


def other_fate(source: Path, out: Path) -> None:
    path = out / "lowbit.json"
    path.write_text(path.read_text().replace('"norm: never', '"norm: ever', 1))


def no_manifest(source: Path, out: Path) -> None:
    (out / "lowbit.json").unlink()


def nothing(source: Path, out: Path) -> None:
    pass


def complete(source: Path, out: Path) -> None:
    shutil.copyfile(source.parent / "whole" / "quality.json", out / "quality.json")


OTHERS: list[tuple[Callable[[Path, Path], None], tuple[str, ...]]] = [
    *((edit, ()) for edit in (edit_source, edit_small_file, add_small_file, edit_config)),
    *((edit, ()) for edit in (damage_weights, damage_small_file, other_release, no_manifest)),
    (other_fate, ()),
    (nothing, ("--recipe", "int8")),
    (nothing, ("--group-size", "32")),
    (nothing, ("--max-shard-size", "300kB")),
    (nothing, ("--method", "absmax")),
    (nothing, ("--lm-head", "bf16")),
    (complete, ()),
]


REASONS = {
    edit_source: "`model.",
    damage_weights: "`",
    damage_small_file: "`tokenizer_config.json` has 2 bytes, expected ",
}


@pytest.mark.parametrize(
    ("edit", "options"), OTHERS, ids=lambda value: getattr(value, "__name__", None) or str(value)
)
def test_what_is_not_the_same_is_not_touched(
    here: Path,
    arguments: list[str],
    killed: Path,
    whole: Path,
    tmp_path: Path,
    edit: Callable[[Path, Path], None],
    options: tuple[str, ...],
) -> None:
    source = Path(shutil.copytree(here / "source", tmp_path / "source"))
    (tmp_path / "whole").symlink_to(whole)
    edit(source, killed)
    before = content(killed)
    done = run(source, killed, *arguments, *options)
    assert done.exit_code == 1
    assert f"`{killed}` is not empty" in done.stderr
    if edit in REASONS and not options:
        assert f"not what this command makes any more: {REASONS[edit]}" in done.stderr
    assert content(killed) == before


def truncate(content: str) -> str:
    return content[:-40]


def change_a_figure(content: str) -> str:
    place = content.index('"relative_l2": 0.') + len('"relative_l2": 0.')
    return content[:place] + ("3" if content[place] != "3" else "4") + content[place + 1 :]


@pytest.mark.parametrize("damage", [truncate, change_a_figure])
def test_a_damaged_report_is_made_again(
    here: Path,
    arguments: list[str],
    killed: Path,
    whole: Path,
    monkeypatch: Patch,
    damage: Callable[[str], str],
) -> None:
    good = content(killed)["quality.json"]
    (killed / "quality.json").write_text(damage((killed / "quality.json").read_text()))
    with only_a_report(monkeypatch):
        done = run(here / "source", killed, *arguments)
    assert done.exit_code == 0
    assert "measured again" in done.stderr
    assert content(killed).keys() == content(whole).keys()
    assert content(killed)["quality.json"] == content(whole)["quality.json"] != good


def test_a_file_of_somebody_else_is_no_reason_to_stop(
    here: Path, arguments: list[str], killed: Path
) -> None:
    (killed / "notes.txt").write_text("mine")
    assert run(here / "source", killed, *arguments).exit_code == 0
    assert (killed / "notes.txt").read_text() == "mine"


def test_an_output_in_the_way_is_found_before_the_sensitivities(
    here: Path, whole: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("lowbit.convert.api._planned", lambda *_: pytest.fail("computed"))
    done = run(here / "source", whole, "--target-bpw", "6")
    assert done.exit_code == 1
    assert "is not empty" in done.stderr
