"""Every command that a help, the README or a page of docs/ shows is taken by its own parsers."""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import click
import pytest

from lowbit.convert.cli.main import main as convert
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.formats.architectures import tensor_table
from lowbit.formats.errors import QuantizationError
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from lowbit.runtime.cli.main import main as run

ROOT = Path(__file__).parents[1]
MODELS = ("tiny-qwen3", "tiny-qwen3.5", "tiny-qwen3-moe", "tiny-qwen3.5-moe")
PROGRAMS: dict[str, click.Group] = {"lowbit-convert": convert, "lowbit-run": run}
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(lowbit-(?:convert|run) .*)")
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
END = ("|", "<", ">", "&&", ";")
READ = (".txt", ".jsonl")  # files that a parser opens


def of_help() -> Iterator[tuple[str, str]]:
    """Name of a command, and a line of its help that begins with the program's name."""
    for program, group in PROGRAMS.items():
        for name, command in group.commands.items():
            for line in (command.epilog or "").splitlines():
                if found := COMMAND.fullmatch(line.strip()):
                    yield f"{program} {name}", found[1]


def of_pages() -> Iterator[str]:
    """Lines in the blocks of code of the README, the pages beside it, and those of docs/."""
    for page in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))):
        if page.name == "CHANGELOG.md":
            continue
        for block in BLOCK.findall(page.read_text()):
            yield from map(str.strip, block.replace("\\\n", " ").splitlines())


EXAMPLES = list(of_help())
SHOWN = [found[1] for line in of_pages() if (found := COMMAND.fullmatch(line))]
LINES = list(dict.fromkeys([*(line for _, line in EXAMPLES), *SHOWN]))


def words_of(line: str) -> list[str]:
    """Words up to a comment, a pipe or a redirection, without the program's name."""
    words = shlex.split(line, comments=True)[1:]
    return words[: next((n for n, word in enumerate(words) if word.startswith(END)), None)]


def parsed(line: str) -> tuple[str, click.Context]:
    """The command that a line means, and the values of its parameters, all of them checked."""
    program = line.split()[0]
    group = PROGRAMS[program]
    context = group.make_context(program, words_of(line))
    with context:
        rest = [*context._protected_args, *context.args]
        name, command, arguments = group.resolve_command(context, rest)
    assert name is not None
    assert command is not None
    return name, command.make_context(name, list(arguments), parent=context)


@pytest.fixture
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that examples read, on a machine with a GPU."""
    monkeypatch.chdir(tmp_path)
    for word in {word for line in LINES for word in words_of(line)}:
        if word.endswith(READ) and "/" not in word:
            Path(word).write_text("Once upon a time there was a robot. " * 100)
        if word.endswith(".toml"):
            Path(word).write_text('model = "org/name"\n')
    monkeypatch.setattr("lowbit.convert.original.device.open_device", lambda name: None)


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize("line", LINES)
def test_examples_parse(line: str) -> None:
    name, context = parsed(line)
    with context:
        shown = {example: command for command, example in EXAMPLES}.get(line)
        assert shown is None or shown.split()[1] == name


def test_there_are_examples() -> None:
    shown = {name for name, _ in EXAMPLES}
    every = {f"{program} {name}" for program, group in PROGRAMS.items() for name in group.commands}
    assert every - shown <= {"lowbit-run chat"}
    assert len(SHOWN) >= 50, "of the pages"


def scripts() -> set[str]:
    """Scripts of examples/ that pages and scripts name."""
    texts = [page.read_text() for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))]
    texts += [path.read_text() for path in ROOT.glob("examples/**/*.py")]
    return {name for text in texts for name in re.findall(r"python (examples/\S+\.py)", text)}


@pytest.mark.parametrize("name", sorted(scripts()))
def test_scripts_are_there(name: str) -> None:
    assert (ROOT / name).is_file()


def quoted() -> Iterator[tuple[click.Command, click.Option, str]]:
    """Values that the help of an option shows, as in '*.down_proj=8'."""
    for group in PROGRAMS.values():
        for command in group.commands.values():
            for option in command.params:
                if isinstance(option, click.Option):
                    for value in re.findall(r"(?<!\w)'([^']+)'(?!\w)", option.help or ""):
                        yield command, option, value


@pytest.mark.parametrize(
    ("command", "option", "value"),
    list(quoted()),
    ids=[f"{command.name} {option.opts[0]} {value}" for command, option, value in quoted()],
)
def test_values_in_the_help_of_an_option_parse(
    command: click.Command, option: click.Option, value: str
) -> None:
    option.process_value(click.Context(command), (value,) if option.multiple else value)


def patterns() -> set[str]:
    """Values of `--bits` in every example and in its help."""
    found = {value for _, option, value in quoted() if "--bits" in option.opts}
    for line in LINES:
        words = words_of(line)
        found |= {after for word, after in pairwise(words) if word == "--bits"}
    return found


@pytest.mark.parametrize("text", sorted(patterns()))
def test_bits_of_examples_fit_a_model(text: str) -> None:
    refused = []
    for name in MODELS:
        checkpoint = open_checkpoint(ROOT / "examples" / "models" / name)
        table = tensor_table(checkpoint.config, checkpoint.tensors)
        try:
            Recipe(overrides=(Override.parse(text),)).schemes(table)
        except QuantizationError as error:
            refused.append(f"{name}: {error}")
    assert len(refused) < len(MODELS), refused
