"""Mistakes of a new user: what both commands say of them, and which way out they name."""

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lowbit.convert.cli.main import main as convert_main
from lowbit.runtime.cli.main import main as run_main

MODEL = Path(__file__).parents[1] / "examples" / "models" / "tiny-qwen3"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(convert_main, [str(each) for each in arguments])


def run(*arguments: object) -> Result:
    return CliRunner().invoke(run_main, [str(each) for each in (*arguments, "Hi")])


def said(done: Result, message: str, hint: str) -> None:
    """Compare what a command that failed has printed, line ends of a terminal left out."""
    assert done.exit_code == 1, done.output
    assert done.stderr.split() == f"Error: {message} hint: {hint}".split()
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("packd", "did you mean `packed`? Otherwise "),
        ("./pakced", "did you mean `packed`? Otherwise "),
        ("{here}/no/such", "`{here}/no` does not exist; "),
        ("../{base}/none", "`../{base}/none` does not exist; "),
        ("~/packed", "`~` is the home folder only where it stands outside of quotes; "),
    ],
)
def test_misspelt_folder(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / "packed").mkdir()
    name, hint = (text.format(here=tmp_path, base=tmp_path.name) for text in (name, hint))
    message = f"`{name}` is neither a folder nor a model on the Hub"
    for done in (convert(name, "out"), run(name)):
        said(done, message, hint + "give a folder or a Hub id, `org/name`")


def test_id_without_its_owner() -> None:
    said(
        convert("Qwen3-1.7B", "out"),
        "`Qwen3-1.7B` is neither a folder nor a model on the Hub",
        "give a folder or a Hub id, `org/name`; a private one needs `hf auth login`",
    )


@pytest.mark.parametrize(
    ("named", "made", "hint"),
    [
        ("cache", "cache/snapshots/abc", "did you mean `cache/snapshots/abc`?"),
        ("models", "models/mine", "did you mean `models/mine`?"),
        (
            "out.partial",
            None,
            "a conversion has not finished here; the command that began it continues",
        ),
        ("empty", None, "give the folder that holds config.json and the .safetensors files"),
    ],
)
def test_folder_without_config(named: str, made: str | None, hint: str) -> None:
    Path(named).mkdir()
    if made is not None:
        Path(made).mkdir(parents=True)
        shutil.copy(MODEL / "config.json", made)
    message = f"`{named}` is not a checkpoint: it has no config.json"
    for done in (convert(named, "out"), run(named)):
        said(done, message, hint)


def test_clone_without_its_large_files() -> None:
    Path("clone").mkdir()
    shutil.copy(MODEL / "config.json", "clone")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 11829384\n"
    Path("clone/model.safetensors").write_text(pointer)
    message = "`model.safetensors` is a pointer of Git LFS, which stands for the weights"
    hint = "`git lfs pull` in its folder fetches them; or give the model's Hub id"
    for done in (convert("clone", "out"), run("clone")):
        said(done, message, hint)


@pytest.mark.parametrize(
    ("method", "runs"),
    [("gptq", True), ("awq", True), ("compressed-tensors", False)]
    + [(method, False) for method in ("bitsandbytes", "torchao", "fp8", "hqq", "mxfp4")],
)
def test_quantized_folder_to_convert(method: str, runs: bool) -> None:
    """lowbit-run is named only where it would not send back."""
    shutil.copytree(MODEL, "model")
    config = json.loads(Path("model/config.json").read_text())
    config["quantization_config"] = {"quant_method": method}  # without groups of its own
    Path("model/config.json").write_text(json.dumps(config))
    said(
        convert("model", "out"),
        f"the source is already quantized (`{method}`)",
        "convert from the BF16 checkpoint; lowbit-run "
        + ("may run it as it is" if runs else "does not run it either"),
    )
    if not runs and method != "compressed-tensors":
        assert f"quantization method `{method}` is not supported" in run("model").stderr


def test_output_on_the_original(tmp_path: Path) -> None:
    """--overwrite replaces packed folders only, so it is no advice here."""
    shutil.copytree(MODEL, "model")
    said(convert("model", "model"), f"`{tmp_path}/model` is not empty", "choose another folder")


def test_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    usage = shutil.disk_usage(tmp_path)._replace(free=2_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(os, "posix_fallocate", full)
    said(
        convert(MODEL, "out", "--method", "rtn"),
        f"the disk is full: `{tmp_path}/out.partial` needs 6 MB more, free: 2 MB",
        "free some space and run the same command again, or name a folder on another disk",
    )


def test_size_without_a_unit() -> None:
    done = convert(MODEL, "out", "--target-size", "5")
    assert done.exit_code == 1
    assert "5 bytes cannot be met" in done.stderr
    assert "units can be named, as in 5GB" in done.stderr


def test_prompt_without_quotes() -> None:
    done = run(MODEL, "Why", "is", "the", "sky", "blue?")
    assert done.exit_code == 2
    text = " ".join(done.stderr.split())
    assert "unexpected extra arguments (is the sky blue? Hi). Words that belong together" in text


def test_architecture_by_another_name() -> None:
    done = CliRunner().invoke(run_main, ["compile", str(MODEL), "--arch", "hopper"])
    assert done.exit_code == 2
    assert "`hopper`: expected names among sm_80, sm_86," in " ".join(done.stderr.split())


def test_line_of_a_file_of_prompts() -> None:
    Path("prompts.jsonl").write_text('{"prompt": "Why?"\n')
    command = ["generate", str(MODEL), "--prompts", "prompts.jsonl", "--out", "answers.jsonl"]
    said(
        CliRunner().invoke(run_main, command),
        "file of prompts `prompts.jsonl`, line 1: cannot be read as JSON: Expecting ',' "
        "delimiter: line 1 column 18 (char 17)",
        'a line is an object such as {"id": "1", "prompt": "Why is the sky blue?"}',
    )


def test_disk_error_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, offset: int, size: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "posix_fallocate", refused)
    done = convert(MODEL, "out", "--method", "rtn")
    assert done.exit_code == 1
    assert "Input/output error" in done.stderr
    assert "full" not in done.stderr


@pytest.mark.parametrize("name", ["transformers", "lowbit.nothing", "fcntl"])
def test_missing_library(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A foreign module is missing in the installation; any other is a bug, with its traceback."""

    def missing(*arguments: object) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("lowbit.convert.api.locate", missing)
    done = convert(MODEL, "out")
    if name != "transformers":
        assert isinstance(done.exception, ModuleNotFoundError)
        return
    said(
        done,
        "`transformers` is not installed",
        "pip install -c constraints.txt . in the clone of lowbit; lowbit-run doctor names what is "
        "missing",
    )
