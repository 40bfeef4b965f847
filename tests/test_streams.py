"""Results on stdout, all else on stderr; errors before long work; extremes of every number."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner, Result

from lowbit.convert.cli.main import main as convert
from lowbit.formats.shell.options import MOST
from lowbit.runtime.cli.main import main as run
from lowbit.runtime.lab import machine_speed
from tests.short_models import Shorten

pytestmark = pytest.mark.commands

NAME = "tiny-qwen3"
TEXT = "Once upon a time there was a little robot who lived in a big house. " * 30
CPU = ("--device", "cpu")
SHORT = (*CPU, "--runs", "1", "--new-tokens", "3", "--prompt-tokens", "4")
FEW = (*CPU, "--answers", "2", "--tokens", "2")
Line = tuple[str | Path, ...]


@pytest.fixture(scope="module")
def place(shorten: Shorten, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two layers of a model, two packed ones, and a text."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "text.txt").write_text(TEXT)
    shutil.copytree(shorten(NAME), folder / NAME)
    for name, recipe in (("a", "int4"), ("b", "int8")):
        done = invoke(convert, *packing(folder / NAME, folder / name, "--recipe", recipe))
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(machine_speed.BANDWIDTH_BYTES, "cpu", 1 << 20)


def invoke(program: click.Group, *line: str | Path) -> Result:
    return CliRunner().invoke(program, list(map(str, line)))


def packing(*line: str | Path) -> Line:
    """A line of the command that packs, without calibration."""
    return (*line, "--method", "rtn")


# By command: its line, words of its result, and words that belong on stderr. `push` and
# `sensitivity` are in the tests of their own, which have what they need.
RESULTS: dict[str, tuple[click.Group, Callable[[Path], Line], str, str]] = {
    "quantize": (
        convert,
        lambda p: packing(p / NAME, "out"),
        "bits per weight",
        "report: out/quality.html",
    ),
    "plan": (convert, lambda p: ("plan", p / NAME), "mlp.up_proj", ""),
    "inspect": (convert, lambda p: ("inspect", p / "a"), "up_proj", ""),
    "verify": (convert, lambda p: ("verify", p / "a"), "every hash as in lowbit.json", ""),
    "compare": (
        convert,
        lambda p: ("compare", "--diff", p / "a", p / "b"),
        "model.layers.0.mlp.up_proj",
        "",
    ),
    "report": (
        convert,
        lambda p: ("report", p / "a", "--source", p / NAME, "--eval-text", p / "text.txt"),
        "KL divergence",
        "report: ",
    ),
    "calib-text": (
        convert,
        lambda p: ("calib-text", p / NAME, "own.txt", *FEW),
        "2 answers of ",
        "next: ",
    ),
    "export": (convert, lambda p: ("export", p / "a", "gguf", "--to", "gguf"), "read back", ""),
    "generate": (
        run,
        lambda p: (p / "a", "Once", "--raw", "--seed", "1", "--max-new-tokens", "4", *CPU),
        "\n",  # what two layers say is anything; the test below compares it
        "4 tokens",
    ),
    "bench": (run, lambda p: ("bench", p / "a", *SHORT), "share of the roofline", ""),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_go_to_stdout_and_all_else_to_stderr(place: Path, name: str) -> None:
    program, line, result, aside = RESULTS[name]
    done = invoke(program, *line(place))
    assert done.exit_code == 0, done.output
    assert result in done.stdout
    assert aside in done.stderr
    assert not aside or aside not in done.stdout
    assert "\x1b" not in done.output
    if not aside:
        assert done.stderr == ""


@pytest.mark.parametrize("name", RESULTS)
def test_with_json_stdout_holds_one_object(place: Path, name: str) -> None:
    program, line, _, _ = RESULTS[name]
    done = invoke(program, *line(place), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["schema"] == 1
    assert done.stdout.count("\n") == 1


def test_stdout_of_generate_is_the_text_that_json_holds(place: Path) -> None:
    line = RESULTS["generate"][1](place)
    text = json.loads(invoke(run, *line, "--json").stdout)["text"]
    assert text.strip()
    assert invoke(run, *line).stdout == text + "\n"


def script(room: str, *line: str | Path) -> list[str]:
    return [sys.executable, "-m", f"lowbit.{room}", *map(str, line)]


def test_a_reader_who_leaves_early(place: Path) -> None:
    """`inspect | head -0` ends as if all were read; `lowbit-run | head` stops generating."""
    long = (place / "a", "Once", "--raw", "--device", "cpu")
    for line, code, words in (
        (script("convert", "inspect", place / "a"), 0, ""),
        (script("runtime", *long, "--temperature", "0"), 141, ""),
    ):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            line, stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
        os.close(write)
        assert (done.returncode, done.stderr) == (code, words), line


def test_text_of_files_is_shown_literally(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "a", tmp_path / "[red]x[")
    config = tmp_path / "[red]x[" / "config.json"
    content = json.loads(config.read_text())
    content["[bold]key\x1b[2J"] = "\x1b]0;title\x07\nvalue[/]"
    config.write_text(json.dumps(content))
    done = invoke(convert, "compare", "--diff", place / "a", tmp_path / "[red]x[")
    assert done.exit_code == 0, done.output
    (row,) = [line for line in done.stdout.splitlines() if "[bold]key" in line]
    assert "[bold]key\\x1b[2J" in row
    assert "\\x1b]0;title\\x07\\nvalue[/]" in row
    assert "[red]x[" in done.stdout
    assert "\x1b" not in done.output


def test_names_that_are_no_unicode(place: Path, tmp_path: Path) -> None:
    """A folder and a text whose names are bytes of another encoding are measured like others."""
    folder, text = tmp_path / "m\udcff", tmp_path / "t\udcff\x1b.txt"
    shutil.copytree(place / "a", folder)
    shutil.copy(place / "text.txt", text)
    for line in (
        ("inspect", folder),
        ("verify", folder),
        ("compare", "--diff", folder, place / "a"),
    ):
        assert invoke(convert, *line).exit_code == 0
    done = invoke(convert, "report", folder, "--source", place / NAME, "--eval-text", text)
    assert done.exit_code == 0, done.output
    assert "t\\udcff\\x1b.txt" in done.stdout


# Combinations that fail, with the exit code; TEXT and PACKED stand for paths that are there.
EARLY: tuple[tuple[click.Group, str, int, str], ...] = (
    (convert, "SRC out --gate top1>0", 2, "--gate is for the comparison"),
    (convert, "SRC out --eval-text TEXT", 2, "--eval-text is for the comparison"),
    (convert, "SRC out --report --eval-text none.txt", 1, "`none.txt` cannot be read"),
    (convert, "SRC out --report --gate x.kl_mean<1", 2, "no evaluation text is named"),
    (convert, "SRC out --calib TEXT --method rtn", 2, "--calib is for calibrated methods"),
    (
        convert,
        "SRC out --calib-samples 3 --method rtn",
        2,
        "--calib-samples is for calibrated methods",
    ),
    (
        convert,
        "SRC out --calib-length 3 --method absmax",
        2,
        "--calib-length is for calibrated methods",
    ),
    (
        convert,
        "SRC out --method rtn --calib-chat --calib-length 3",
        2,
        "are for calibrated methods",
    ),
    (convert, "SRC out --method gptq --calib none.txt", 1, "`none.txt` cannot be read"),
    (convert, "SRC out --method gptq --calib TEXT.md", 1, "expected a .txt or .jsonl file"),
    (convert, "SRC out --private", 2, "are for --push-to-hub"),
    (convert, "SRC out --device cuda", 1, "no CUDA device was found"),
    (convert, "SRC PACKED", 1, "is not empty"),
    (convert, "SRC PACKED --target-bpw 5", 1, "is not empty"),
    (convert, "SRC out --target-bpw 5 --target-size 1GB", 2, "two ways to give one target"),
    (convert, "SRC out --target-bpw 5 --sensitivities none.json", 1, "none.json"),
    (convert, "SRC out --target-bpw 5 --sensitivities TEXT", 1, "TEXT"),
    (convert, "SRC out --sensitivities TEXT", 2, "--sensitivities is for"),
    (convert, "SRC out\udc80", 2, "is not valid UTF-8"),
    (convert, "plan SRC --calib none.txt", 1, "`none.txt` cannot be read"),
    (convert, "plan SRC --target-bpw 5 --calib none.txt", 1, "`none.txt` cannot be read"),
    (convert, "plan SRC --target-bpw 5 --device cuda", 1, "no CUDA device was found"),
    (convert, "sensitivity SRC --out none.svg", 2, "the plot has its name"),
    (convert, "sensitivity SRC --out /proc/x.json", 1, "cannot be written"),
    (convert, "sensitivity SRC --out /proc/none/x.json", 1, "cannot be written"),
    (convert, "sensitivity SRC --calib none.txt", 1, "`none.txt` cannot be read"),
    (convert, "sensitivity SRC --device cuda", 1, "no CUDA device was found"),
    (convert, "calib-text SRC TEXT", 1, "exists already"),
    (convert, "calib-text SRC out.jsonl", 2, "does not end in .txt"),
    (convert, "calib-text SRC /proc/x.txt", 2, "cannot be written"),
    (convert, "calib-text SRC out.txt --tokens 2048", 1, "the model's context of 2048"),
    (convert, "calib-text SRC out.txt --device cuda", 1, "no CUDA device was found"),
    (convert, "report PACKED --eval-text none.txt", 1, "`none.txt` cannot be read"),
    (convert, "report PACKED --gate x.kl_mean<1", 2, "no evaluation text is named"),
    (convert, "report PACKED --device cuda", 1, "no CUDA device was found"),
    (convert, "verify PACKED --calib TEXT", 2, "--calib goes with --source"),
    (convert, "verify PACKED --source ./none", 1, "neither a folder nor a model"),
    (convert, "verify PACKED --source SRC --calib none.txt", 1, "`none.txt` cannot be read"),
    (convert, "compare PACKED PACKED --out none/x.html", 2, "there is no folder"),
    (convert, "compare PACKED PACKED --out /proc/x.html", 2, "cannot be written"),
    (convert, "export PACKED PACKED --to gguf", 1, "is not empty"),
    (convert, "export PACKED out --to gguf --max-shard-size 0", 2, "must be positive"),
    (convert, "push none me/x", 1, "none"),
    (convert, "inspct none", 2, "did you mean the command 'inspect'?"),
    (run, "PACKED Hi --raw --system x", 2, "--raw takes no --system"),
    (run, "PACKED Hi --device cuda", 1, "no CUDA device was found"),
    (run, "PACKED Hi --threads 100000", 2, "cores of this machine"),
    (run, "bench PACKED --prompt-tokens 99999", 1, "positions for 1 to 2048 tokens"),
    (run, "evaluate PACKED --tasks ,", 2, "names no task"),
    (run, "evaluate PACKED --tasks x --think", 2, "need --chat"),
    (run, "evaluate PACKED --tasks x --task-folder none", 2, "does not exist"),
    (run, "genrate Hi", 2, "did you mean the command 'generate'?"),
    (run, "-c 512 -t 100000 PACKED Hi", 2, "cores of this machine"),
    (run, "PACKED Hi -n0", 2, "'-n': 0 is not in the range"),
    (run, "chatt", 2, "did you mean the command 'chat'?"),
    (run, "hlep", 2, "did you mean the command 'help'?"),
    (run, "eval PACKED", 2, "did you mean the command 'evaluate'?"),
    (run, "--device cpu chat PACKED", 2, "The command 'chat' comes first"),
    (run, "--device cpu chatt", 2, "did you mean the command 'chat'?"),
    (run, "help chatt", 2, "did you mean the command 'chat'?"),
    (run, "help nothing", 2, "There is no command 'nothing'"),
    (run, "nowhere", 1, "`nowhere` is neither a folder nor a model on the Hub"),
    (run, "https://hf.co/datasets/a/b", 2, "is a data set, expected a model"),
    (convert, "quantise SRC out", 2, "did you mean the command 'quantize'?"),
    (convert, "hepl", 2, "did you mean the command 'help'?"),
)


@pytest.mark.parametrize(("program", "line", "code", "message"), EARLY, ids=[e[1] for e in EARLY])
def test_errors_come_before_long_work(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: click.Group,
    line: str,
    code: int,
    message: str,
) -> None:
    def reached(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the long work has begun")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for work in (
        "convert.api.make_plan",
        "convert.budget.lookup.load_layered_model",
        "convert.texts.own_text.build_model",
        "convert.report.reporting.pair_of",
        "convert.pipeline.verification._check_files",
        "convert.export.export.open_source",
        "convert.publish.push.patiently",
        "runtime.engine.load.load_decoder",
    ):
        monkeypatch.setattr(f"lowbit.{work}", reached)
    names = {"SRC": place / NAME, "PACKED": place / "a", "TEXT": place / "text.txt"}
    (place / "text.md").write_text(TEXT)
    names["TEXT.md"] = place / "text.md"
    done = invoke(program, *(names.get(word, word) for word in line.split()))
    assert not isinstance(done.exception, AssertionError), done.exception
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    assert message.replace("TEXT", "text.txt") in " ".join(done.stderr.split())
    assert not Path("out").exists()
    assert not Path("out.partial").exists()


ABSURD = ("-1", str(MOST + 1), str(10**12), str(2**64), "9" * 40, "1e308", "nan", "inf", "x", "")


def numeric() -> Iterator[tuple[click.Group, click.Command, click.Option]]:
    for program in (convert, run):
        for command in program.commands.values():
            for option in command.params:
                if isinstance(option, click.Option) and isinstance(
                    option.type, click.types.IntParamType | click.types.FloatParamType
                ):
                    yield program, command, option


@pytest.mark.parametrize(
    ("program", "command", "option"),
    list(numeric()),
    ids=[f"{command.name}{option.opts[0]}" for _, command, option in numeric()],
)
def test_absurd_numbers_are_usage_errors(
    program: click.Group, command: click.Command, option: click.Option
) -> None:
    whole = isinstance(option.type, click.types.IntParamType)
    for value in ABSURD:
        given: float | None
        try:
            given = int(value) if whole else float(value)
        except ValueError:
            given = None
        seed = option.opts[0] == "--seed" and given is not None and 0 <= given < 2**63
        if seed or (not whole and given is not None and abs(given) < float("inf")):
            continue  # any finite number
        done = invoke(program, str(command.name), "none", "none", f"{option.opts[0]}={value}")
        assert done.exit_code == 2, (value, done.output)
        assert option.opts[0] in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--temperature", "1e-320"),
        ("--temperature", "1000"),
        ("--top-k", str(2**22)),
        ("--top-p", "1e-320"),
        ("--min-p", "1"),
        ("--repetition-penalty", "0.01"),
        ("--repetition-penalty", "100"),
        ("--presence-penalty", "-2"),
        ("--max-new-tokens", "1"),
        ("--seed", str(2**63 - 1)),
    ],
    ids=" ".join,
)
def test_extremes_in_range_give_text(place: Path, options: tuple[str, ...]) -> None:
    line = (place / "a", "Once", "--raw", "--device", "cpu", "--context", "6")
    done = invoke(run, *line, *options)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip()


@pytest.mark.parametrize("context", ["2049", str(MOST)])
def test_contexts_beyond_the_model(place: Path, context: str) -> None:
    done = invoke(run, place / "a", "Once", "--device", "cpu", "--context", context)
    assert done.exit_code == 1
    assert "the model has positions for 1 to 2048 tokens" in done.stderr


def test_a_larger_context_is_advised_where_it_is_possible(place: Path) -> None:
    line = (place / "a", "--device", "cpu", "--raw")
    possible = invoke(run, *line, "Once upon a time", "--context", "2")
    assert "ask for a larger --context" in possible.stderr
    for times in (800, 8000):  # too many tokens, and too many bytes to be tokens at all
        impossible = invoke(run, *line, "Once upon a time " * times, "--context", "2048")
        assert impossible.exit_code == 1
        assert impossible.stderr.endswith("hint: shorten the prompt\n")
