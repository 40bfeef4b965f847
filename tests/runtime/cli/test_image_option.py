"""`--image` of `lowbit-run`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lowbit.formats.errors import RequestError
from lowbit.runtime.cli.main import main
from lowbit.runtime.cli.options import load_text_model
from lowbit.runtime.engine import load
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.vision_place import VisionPlace
from lowbit.runtime.images.data_url import data_url
from tests.runtime.images.pictures import picture, saved

pytestmark = pytest.mark.commands

BLIND = str(Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3")
SHORT = ("--device", "cpu", "--max-new-tokens", "3", "--temperature", "0", "--context", "512")


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "screen.png"
    path.write_bytes(saved(picture(90, 70)))
    return path


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments], input=stdin)


def test_images_are_shown_with_the_prompt(seeing_folder: Path, png: Path) -> None:
    result = run(seeing_folder, "Which?", "--image", png, "--image", png, "--json", *SHORT)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["prompt_token_ids"].count(310) == 12


def test_the_prompt_may_come_from_stdin(seeing_folder: Path, png: Path) -> None:
    result = run(seeing_folder, "--image", png, "--json", *SHORT, stdin="Which?")
    assert json.loads(result.stdout)["prompt_token_ids"].count(310) == 6


def test_a_bad_file_is_named_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowbit.runtime.cli.generate.load_model", None)
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    result = run(BLIND, "Which?", "--image", bad, *SHORT)
    assert result.exit_code == 1
    assert f"image `{bad}`" in " ".join(result.stderr.split())


def test_an_address_is_named() -> None:
    result = run(BLIND, "Which?", "--image", "https://example.org/a.png", *SHORT)
    assert result.exit_code == 1
    assert "is an address, expected a file" in " ".join(result.stderr.split())


def test_a_model_without_tower_is_named(png: Path) -> None:
    result = run(BLIND, "Which?", "--image", png, *SHORT)
    assert result.exit_code == 1
    assert "the model takes no images" in " ".join(result.stderr.split())


@pytest.mark.parametrize("more", [["--raw"], ["--prompts", "lines.jsonl"]])
def test_options_that_have_no_place_for_images(png: Path, more: list[str]) -> None:
    prompt = [] if more[0] == "--prompts" else ["Which?"]
    result = run(BLIND, *prompt, "--image", png, *more)
    assert result.exit_code == 2
    assert "--image" in result.stderr


def test_lines_of_a_file_hold_their_own(seeing_folder: Path, tmp_path: Path, png: Path) -> None:
    url = data_url(png.read_bytes())
    parts = [{"type": "image", "image": url}, {"type": "text", "text": "Which?"}]
    line = {"id": 1, "messages": [{"role": "user", "content": parts}]}
    (tmp_path / "lines.jsonl").write_text(json.dumps(line))
    result = run(seeing_folder, "--prompts", tmp_path / "lines.jsonl", "--json", *SHORT)
    assert json.loads(result.stdout)["prompt_token_ids"].count(310) == 6


def test_the_device_of_the_tower_is_refused_or_noted(seeing_folder: Path, png: Path) -> None:
    shown = (seeing_folder, "Which?", "--image", png, *SHORT)
    assert "--vision-device" not in run(*shown).stderr
    assert run(*shown, "--vision-device", "cpu").exit_code == 0
    refused = run(*shown, "--vision-device", "cuda")
    assert refused.exit_code == 1
    assert "runs on a GPU only where the model does" in " ".join(refused.stderr.split())
    assert run(*shown, "--vision-device", "tpu").exit_code == 2


def test_a_place_that_was_chosen_is_noted(
    seeing_folder: Path, png: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "memory is short"
    place = VisionPlace("cpu", reason=reason)
    monkeypatch.setattr(load, "place_tower", lambda memory, asked, device, of: (of(0), place))
    shown = run(seeing_folder, "Which?", "--image", png, *SHORT)
    assert f"--vision-device auto: cpu; {reason}" in shown.stderr
    assert reason not in run(seeing_folder, "Which?", *SHORT).stderr  # no image, no tower
    talk = run("chat", seeing_folder, *SHORT, stdin="Hi")
    assert f"--vision-device auto: cpu; {reason}" in talk.stderr


def test_a_place_is_noted_for_lines_of_a_file(
    seeing_folder: Path, tmp_path: Path, png: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = VisionPlace("cpu", reason="memory is short")
    monkeypatch.setattr(load, "place_tower", lambda memory, asked, device, of: (of(0), place))
    parts = [{"type": "image", "image": data_url(png.read_bytes())}]
    lines = tmp_path / "lines.jsonl"
    said = []
    for content in ("Which?", parts):
        lines.write_text(json.dumps({"id": 1, "messages": [{"role": "user", "content": content}]}))
        said.append(run(seeing_folder, "--prompts", lines, *SHORT).stderr)
    assert ["memory is short" in each for each in said] == [False, True]
    blind = run(BLIND, "--prompts", lines, *SHORT, "--vision-device", "cpu")
    assert "--vision-device cpu has no effect" in blind.stderr


def test_a_device_without_a_tower_is_noted() -> None:
    said = " ".join(run(BLIND, "Which?", *SHORT, "--vision-device", "cpu").stderr.split())
    assert "--vision-device cpu has no effect: " in said
    assert "has no vision tower" in said
    assert "--vision-device" not in run(BLIND, "Which?", *SHORT).stderr


def test_work_without_images_keeps_no_memory_for_the_tower(
    seeing_folder: Path, monkeypatch: pytest.MonkeyPatch, png: Path
) -> None:
    monkeypatch.setattr(load, "place_tower", None)
    model = load_text_model(str(seeing_folder), LoadOptions(device="cpu", context=60))
    assert model.vision is None
    shown = {"type": "image", "image": png.read_bytes()}
    with pytest.raises(RequestError, match="it was loaded without images"):
        model.generate([{"role": "user", "content": [shown]}])
