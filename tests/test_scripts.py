"""Every script of examples/ starts: it explains itself, or is run by a test of its own."""

import ast
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

pytestmark = pytest.mark.scripts

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = {path.stem: path for path in sorted(EXAMPLES.rglob("*.py"))}
START = 'if __name__ == "__main__":'
# They take no options: test_examples and test_evaluate run them to their end.
RUN_WHOLE = ("quickstart", "make_stories_cloze")
JOB = ("source", "out", "text.txt", "1", "64", "32")
MODULE_OF = {"llama-cpp-python": "llama_cpp"}
GPU = (
    *("bench_cache", "bench_company", "bench_experts", "bench_kernels", "bench_models"),
    "tune_attention",
)


def start(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    """Run a script in this process, as `python SCRIPT ARGUMENTS` would."""
    path = SCRIPTS[name]
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # some set it for processes of their own
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize(
    "name",
    [name for name, path in SCRIPTS.items() if START in path.read_text() and name not in RUN_WHOLE],
)
def test_scripts_explain_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, name, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.lower().startswith(f"usage: {name}.py ")
    assert len(shown.splitlines()) > 3, "a sentence"


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run for minutes")
@pytest.mark.parametrize("name", GPU)
def test_kernel_scripts_say_that_they_need_a_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with pytest.raises(SystemExit, match=f"^{name} needs an NVIDIA GPU$"):
        start(monkeypatch, name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run for minutes")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bench_constraints", ()),
        ("bench_engine", ()),
        ("bench_long_contexts", ("8b",)),
        ("bench_peers", ()),
        ("bench_vocabulary", ("3.5-0.8B", str(EXAMPLES / "models" / "tiny-qwen3.5"))),
        ("peers_gemv", ("cublas",)),
        ("peers_prompts", ("8b",)),
    ],
)
def test_scripts_of_servers_and_peers_say_that_they_need_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: tuple[str, ...],
) -> None:
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, name, *arguments)
    said = f"{capsys.readouterr().err}{ended.value.code}"
    assert f"{name} needs an NVIDIA GPU" in said


@pytest.mark.parametrize(
    ("name", "arguments", "library"),
    [
        ("check_llama_cpp", (".",), "llama-cpp-python"),
        ("peers_quantize", ("auto-round:x", *JOB), "auto_round"),
        ("peers_quantize", ("llmcompressor:GPTQ", *JOB), "llmcompressor"),
    ],
)
def test_scripts_of_other_engines_name_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: tuple[str, ...],
    library: str,
) -> None:
    if find_spec(MODULE_OF.get(library, library)) is not None:
        pytest.skip(f"{library} is installed")
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, name, *arguments)
    assert ended.value.code == 1
    assert f"{library} is not installed" in capsys.readouterr().err


def test_bench_vocabulary_counts_as_the_tokenizers_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before by the tokenizers library; after there are more tokens, but none a byte."""
    model = EXAMPLES / "models" / "tiny-qwen3.5"
    text = "Once upon a time, a velociraptor sailed the Zuiderzee. " * 50
    (tmp_path / "own.txt").write_text(text)
    options = ("--keep", "1024", "--text", f"own={tmp_path / 'own.txt'}", "--no-speed")
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, "bench_vocabulary", "3.5-0.8B", str(model), *options)
    assert ended.value.code == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "own: bytes/token" in line]
    before, after, change = lines[0].split()[-3:]
    tokens = len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids)
    assert before == f"{len(text) / tokens:.2f}"
    assert 1 < float(after) < float(before)
    assert float(change[:-1]) == pytest.approx(100 * (float(after) / float(before) - 1), abs=1)


def test_files_without_a_command_are_imported_by_a_script() -> None:
    helpers = {name for name, path in SCRIPTS.items() if START not in path.read_text()}
    trees = [ast.parse(path.read_text()) for path in SCRIPTS.values()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    assert helpers <= imported


def test_names_are_unique() -> None:
    """A script finds siblings by their names, in whichever folder they are."""
    assert len(SCRIPTS) == len(list(EXAMPLES.rglob("*.py")))


def test_cache_types_lose_the_more_the_coarser_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, "cache_types", str(EXAMPLES / "models" / "tiny-qwen3"), "--tokens", "99")
    assert ended.value.code == 0
    lines = [line.split(", ")[1] for line in capsys.readouterr().out.splitlines()]
    found = {name: float(kl) for name, kl in (line.split(": ") for line in lines)}
    assert list(found) == ["bf16", "int8", "fp8", "int4"]
    assert 0 < found["bf16"] < found["int8"] < found["fp8"] / 4 < found["int4"] / 40
