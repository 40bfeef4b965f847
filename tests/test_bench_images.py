"""The benchmark of images over HTTP: its pictures, its model, and the servers that it starts."""

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from PIL import Image

import lowbit.runtime as lowbit
from tests.load_script import ROOT, load_script

BENCHMARKS = ROOT / "examples" / "benchmarks"
SCRIPT = BENCHMARKS / "bench_images.py"
SEEING = ROOT / "examples" / "models" / "tiny-qwen3.5-vision"
SMALL_TEXT = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
SMALL_TOWER = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
QUICK = ("--side", "64", "--clients", "2", "--new", "3", "--pictures", "1", "--rounds", "1")
STAND_IN = """
import os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if not os.path.exists(os.path.join(given["--model"], "preprocessor_config.json")):
    sys.exit("no processor")
assert given["--load-format"] == "dummy" and given["--quantization"] == "fp8", given
command = ["-m", "lowbit.runtime", "serve", given["--stand-in"], "--device", "cpu"]
command += ["--context", "1024", "--port", given["--port"]]
command += ["--served-name", given["--served-model-name"]]
os.execv(sys.executable, [sys.executable, *command])
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return load_script("bench_images")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(("name", "kind"), [("photo", "JPEG"), ("screenshot", "PNG")])
def test_pictures_differ(script: ModuleType, name: str, kind: str) -> None:
    draw: Callable[[int, Random], str] = getattr(script, name)
    random = Random(1)
    urls = [draw(200, random), draw(200, random)]
    for url in urls:
        head, _, content = url.partition(",")
        assert head == f"data:image/{kind.lower()};base64"
        image = Image.open(io.BytesIO(base64.b64decode(content)))
        assert (image.format, image.size) == (kind, (200, 200))
    assert urls[0] != urls[1]
    assert urls[0] == draw(200, Random(1))


@pytest.mark.parametrize("tokenizer", [None, SEEING], ids=["trained", "copied"])
def test_random_models_with_towers_see(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Path | None
) -> None:
    """The folder of a real size, with few and narrow layers, answers about a picture."""
    checkpoints = sys.modules["make_random_checkpoint"]
    monkeypatch.setattr(checkpoints, "POOL", 1 << 16)
    monkeypatch.setattr(checkpoints, "FIRST_SPECIAL", {"qwen3_5": 300})
    config = checkpoints.seeing_config_of("3.5-4B")
    config["text_config"] |= SMALL_TEXT | {"vocab_size": 512, "eos_token_id": 7}
    config["vision_config"] |= SMALL_TOWER | {"out_hidden_size": 256}
    if tokenizer is not None:
        given = json.loads((tokenizer / "config.json").read_text())
        config |= {name: given[name] for name in config if name.endswith("_token_id")}
    folder = tmp_path / "model"
    checkpoints.write(config, folder, packed="int4", tokens=tokenizer)
    model = lowbit.load(folder, device="cpu", context=128)
    message = script.asks("Hi", script.screenshot(64, Random(1)))
    answer = model.generate([message], max_new_tokens=3)
    image = config["image_token_id"]
    assert answer.prompt_token_ids.count(image) == 64  # 64 x 64 pixels become 256 x 256
    assert len(answer.token_ids) == 3
    assert model.template is not None
    assert model.template.source == (folder / "chat_template.jinja").read_text()
    model.close()


@pytest.mark.slow
@pytest.mark.scripts
def test_servers_are_measured(tmp_path: Path) -> None:
    """A stand-in takes the place of vLLM: it gets vLLM's options, and starts another server."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(STAND_IN)
    options = ("--vllm", "--site", str(tmp_path / "site"), "--", "--stand-in", str(SEEING))
    done = run(*QUICK, *options)
    assert done.returncode == 0, done.stderr
    facts, *found = map(json.loads, done.stdout.splitlines())
    assert (facts["model"], facts["clients"]) == ("3.5-4B", 2)
    first, second, seeing, *talking = found
    assert [first["figure"], second["figure"]] == ["first token", "second turn"]
    assert first["prompt_tokens"] < second["prompt_tokens"]
    assert [each["tokens"] for each in (seeing, *talking)] == [6, 6, 3]
    for each in found:
        assert f"{each['figure']:<34}" in done.stderr


@pytest.mark.slow
@pytest.mark.scripts
@pytest.mark.parametrize("without", ["", "locked,graphs,tails"])
def test_time_is_split_by_part(without: str) -> None:
    own = ("--folder", str(SEEING), "--context", "1024", "--without", without)
    command = [sys.executable, str(BENCHMARKS / "profile_images.py"), *QUICK, *own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += ["--", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    _, *bursts = done.stdout.split("\n2 clients, ")
    assert [burst.split(",")[0] for burst in bursts] == ["2 pictures"] * 2 + ["0 pictures"] * 2
    for burst in bursts:
        assert ("  tower  " in burst) == burst.startswith("2 pictures")
        for part in (
            "  chunk of up to ",
            "  step of ",
            "  between parts  ",
            "  host: step of the ",
        ):
            assert part in burst


@pytest.mark.slow
@pytest.mark.scripts
def test_server_that_does_not_start_is_explained(tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text("raise SystemExit('no such card')")
    done = run(*QUICK, "--vllm", "--site", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("no such card\nthe server ended with 1\n")
