"""`calib-text`: the file it writes, its use for calibration, and all it refuses before any work."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from lowbit.convert.plan import memory
from lowbit.convert.texts import own_text
from lowbit.convert.texts.calibration import bundled_texts, read_calibration

Cli = Callable[..., Result]
FEW = ("--answers", "6", "--tokens", "12", "--device", "cpu")


@pytest.fixture(scope="module")
def tiny(short: Path) -> Path:
    return short


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """The bundled model, to be spoiled."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.mark.commands
def test_the_text_holds_answers_and_the_bundled_texts(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    out, again, other = (tmp_path / f"{name}.txt" for name in ("own", "again", "other"))
    done = cli("calib-text", tiny, out, *FEW)
    assert done.exit_code == 0, done.output
    assert "own.txt written in" in done.stdout
    assert "6 answers of " in done.stdout
    assert done.stderr == f"next: lowbit-convert {tiny} OUT --calib {out}\n"

    text = out.read_text(encoding="utf-8")
    bundled = "\n".join(bundled_texts())
    assert text.endswith(f"\n{bundled}")
    own = text.removesuffix(bundled)
    assert own.count("<|im_start|>user\n") == own.count("<|im_start|>assistant\n") == 6
    assert own.count("<think>\n\n</think>\n\n") >= 3  # every second prompt without thinking

    asked = cli("calib-text", tiny, again, *FEW, "--json")
    assert again.read_bytes() == out.read_bytes()
    said = json.loads(asked.stdout)
    assert asked.stderr == ""
    assert {**said, "seconds": 0} == {
        "schema": 1,
        "file": str(again),
        "answers": 6,
        "ended": said["ended"],
        "tokens": said["tokens"],
        "batch": 16,
        "seconds": 0,
    }
    assert 6 <= said["tokens"] <= 72
    assert cli("calib-text", tiny, other, *FEW, "--seed", "1").exit_code == 0
    assert other.read_bytes() != out.read_bytes()

    read = read_calibration(out, tiny, length=128, limit=10**6)
    alone = read_calibration(None, tiny, length=128, limit=10**6)
    assert read.name == "own.txt"
    assert read.tokens > alone.tokens + said["tokens"]


@pytest.mark.commands
def test_hybrid_models_answer(cli: Cli, hybrid: Path, tmp_path: Path) -> None:
    done = cli("calib-text", hybrid, tmp_path / "own.txt", *FEW)
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("next: ")  # and no advice on speed


def test_an_existing_file_is_replaced_on_request_alone(
    cli: Cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "own.txt"
    out.write_text("mine")
    done = cli("calib-text", tiny, out, *FEW)
    assert done.exit_code == 1
    assert "exists already" in done.stderr
    assert "--overwrite" in done.stderr
    assert out.read_text() == "mine"
    with monkeypatch.context() as patch:
        patch.setattr(own_text, "load_weights", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert cli("calib-text", tiny, out, *FEW, "--overwrite").exit_code != 0
    assert out.read_text() == "mine"  # nothing is half-written
    assert cli("calib-text", tiny, out, *FEW, "--overwrite").exit_code == 0
    assert out.read_text(encoding="utf-8").startswith("<|im_start|>user\n")
    assert [path.name for path in tmp_path.iterdir()] == ["own.txt"]


def without_template(model: Path) -> None:
    path = model / "tokenizer_config.json"
    content = json.loads(path.read_text())
    del content["chat_template"]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_template, "hint: a base model is calibrated on the bundled text"),
        (lambda model: (model / "tokenizer.json").unlink(), "hint: --method rtn converts without"),
        (lambda model: (model / "config.json").unlink(), "has no config.json"),
    ],
    ids=["template", "tokenizer", "config"],
)
def test_a_folder_that_cannot_be_asked(
    cli: Cli, model: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(model)
    done = cli("calib-text", model, tmp_path / "own.txt", *FEW)
    assert done.exit_code == 1, done.output
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert not (tmp_path / "own.txt").exists()


def test_too_little_memory_is_known_before_loading(
    cli: Cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled(*_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(memory, "free_bytes", lambda _: 10**7)
    monkeypatch.setattr(own_text, "load_weights", filled)
    done = cli("calib-text", tiny, tmp_path / "own.txt", *FEW)
    assert done.exit_code == 1, done.output
    assert "of memory, free on cpu: 0.0 GB" in done.stderr
    assert "hint: calibrate on the bundled text" in done.stderr


def test_a_quantized_model_is_no_original(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    assert cli(tiny, tmp_path / "packed").exit_code == 0
    done = cli("calib-text", tmp_path / "packed", tmp_path / "own.txt", *FEW)
    assert done.exit_code == 1
    assert "is already quantized" in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [("own.jsonl", "does not end in .txt"), ("none/own.txt", "there is no folder")],
)
def test_names_that_cannot_be_used(
    cli: Cli, tiny: Path, tmp_path: Path, name: str, message: str
) -> None:
    done = cli("calib-text", tiny, tmp_path / name, *FEW)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
