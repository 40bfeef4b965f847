"""Help that fits 80 columns in whole sentences, and completion through click's own machinery."""

import re
from collections.abc import Iterator

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from lowbit.convert.cli.main import main as convert
from lowbit.convert.cli.sections import SECTIONS as OF_CONVERT
from lowbit.convert.plan.method import Method
from lowbit.formats.shell.sections import OTHER, Sectioned
from lowbit.runtime.cli.main import main as run
from lowbit.runtime.cli.options import SECTIONS

PROGRAMS: dict[str, click.Group] = {"lowbit-convert": convert, "lowbit-run": run}
WIDTH = 80
NUMBERS = (click.types.IntParamType, click.types.FloatParamType)


def commands() -> Iterator[tuple[str, click.Command]]:
    for program, group in PROGRAMS.items():
        yield program, group
        for name, command in group.commands.items():
            yield f"{program} {name}", command


def options() -> Iterator[tuple[str, click.Option]]:
    for name, command in commands():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield f"{name} {parameter.opts[0]}", parameter


COMMANDS, OPTIONS = dict(commands()), dict(options())


def shown(name: str) -> str:
    program, *rest = name.split()
    result = CliRunner().invoke(PROGRAMS[program], [*rest, "--help"], prog_name=program)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_and_is_whole(name: str) -> None:
    """By the option, and by the word `help`."""
    said = shown(name)
    assert max(map(len, said.splitlines())) <= WIDTH
    assert not re.search(r"[a-z]\.\.\.$", said, re.MULTILINE)  # a sentence that click has cut off
    assert said.startswith(f"Usage: {name} ")
    program, *rest = name.split()
    result = CliRunner().invoke(PROGRAMS[program], ["help", *rest], prog_name=program)
    assert (result.exit_code, result.stdout) == (0, said)


def test_options_are_explained() -> None:
    for name, option in OPTIONS.items():
        assert option.help, name
        if isinstance(option.type, NUMBERS):
            assert option.metavar, f"{name}: its range says the rest"


def test_one_device_option_everywhere() -> None:
    found = [option for name, option in OPTIONS.items() if name.endswith(" --device")]
    assert len(found) >= 12
    assert {repr(it.type) for it in found} == {"Choice(['auto', 'cpu', 'cuda'])"}
    assert {(it.default, it.help) for it in found} == {("auto", found[0].help)}


def test_short_options() -> None:
    short = {"-n": {"max_new_tokens", "new_tokens"}, "-c": {"context"}, "-t": {"threads"}}
    seen = set()
    for name, command in COMMANDS.items():
        options = [it for it in command.params if isinstance(it, click.Option)]
        names = ["-h", *(each for it in options for each in (*it.opts, *it.secondary_opts))]
        assert len(names) == len(set(names)), name
        for option in options:
            for each in option.opts:
                if not each.startswith("--"):
                    assert option.name in short[each], name
                    seen.add(each)
    assert seen == set(short)


SECTIONED = {
    **{f"lowbit-run {name}": run.commands[name] for name in ("generate", "chat", "serve", "bench")},
    **{f"lowbit-convert {name}": convert.commands[name] for name in ("quantize", "plan")},
}


@pytest.mark.parametrize("name", SECTIONED)
def test_sections_show_every_option_once(name: str) -> None:
    said, command = shown(name), SECTIONED[name]
    assert isinstance(command, Sectioned)
    titles = re.findall(r"^([A-Z][\w, ]+):$", said, re.MULTILINE)
    listed = said[said.index(f"\n{titles[0]}:") :]
    for option in command.params:
        if isinstance(option, click.Option):
            found = re.findall(rf"^  (?:-\w, )?{option.opts[0]}(?![\w-])", listed, re.MULTILINE)
            assert len(found) == 1, option.name
    assert not re.search(
        r"^  \[?(MODEL|PROMPT|SRC|OUT)", listed, re.MULTILINE
    )  # an argument is no option
    assert titles == [title for title in (*command.sections, OTHER) if title in titles]
    assert len(titles) >= 5


@pytest.mark.parametrize(("program", "sections"), [(run, SECTIONS), (convert, OF_CONVERT)])
def test_sections_name_parameters_that_exist(
    program: click.Group, sections: dict[str, tuple[str, ...]]
) -> None:
    commands = program.commands.values()
    names = {parameter.name for command in commands for parameter in command.params}
    named = [name for section in sections.values() for name in section]
    assert set(named) <= names
    assert len(named) == len(set(named))


def completed(program: str, line: str) -> set[str]:
    """What the shell offers for the last word of a line: values, `dir` and `file`."""
    *arguments, incomplete = line.split(" ")
    shell = BashComplete(PROGRAMS[program], {}, program, "VARIABLE")
    items = shell.get_completions(arguments, incomplete)
    return {item.value if item.type == "plain" else item.type for item in items}


@pytest.mark.parametrize("program", PROGRAMS)
def test_commands_and_folders_are_completed_first(program: str) -> None:
    names = set(PROGRAMS[program].commands)
    assert completed(program, "") == names | {"dir"}
    first = min(names)
    assert completed(program, first[:3]) == {n for n in names if n.startswith(first[:3])} | {"dir"}


@pytest.mark.parametrize("name", ["lowbit-convert quantize", "lowbit-convert plan"])
def test_every_method_is_completed(name: str) -> None:
    program, *rest = name.split()
    found = completed(program, " ".join([*rest, "--method", ""]))
    assert {"auto", "absmax", "rtn", "gptq+rotate+autoround"} < found
    assert len(found) == 10
    for method in found - {"auto", "absmax"}:
        assert str(Method.parse(method)) == method


def test_every_option_is_completed() -> None:
    for name, command in COMMANDS.items():
        program, *rest = name.split()
        options = [it for it in command.params if isinstance(it, click.Option)]
        wanted = {each for option in options for each in option.opts if "--" in each}
        assert wanted <= completed(program, " ".join([*rest, "--"])), name


def test_values_are_completed() -> None:
    for name, option in OPTIONS.items():
        program, *rest = name.split()
        found = completed(program, " ".join([*rest, ""]))
        if isinstance(option.type, click.Choice):
            assert found == set(option.type.choices), name
            assert completed(program, f"{' '.join(rest)}={next(iter(option.type.choices))}"), name
        elif isinstance(option.type, click.Path):
            assert found in ({"file"}, {"dir"}), name


@pytest.mark.parametrize("name", [n for n, c in COMMANDS.items() if not isinstance(c, click.Group)])
def test_paths_are_completed(name: str) -> None:
    program, *rest = name.split()
    texts, files = {"repo", "prompt"}, {"OUT.txt"}
    arguments = [p for p in COMMANDS[name].params if isinstance(p, click.Argument)]
    for number, argument in enumerate(arguments):
        found = completed(program, " ".join([*rest, *["x"] * number, ""]))
        path = {"file"} if argument.metavar in files else {"dir"}
        assert found == (set() if argument.name in texts else path), argument.name


@pytest.mark.parametrize(
    ("program", "line", "found"),
    [
        ("lowbit-convert", "src ", {"dir"}),
        ("lowbit-convert", "src out --rec", {"--recipe"}),
        ("lowbit-convert", "src out --recipe ", {"int4", "int8", "int3", "int2"}),
        ("lowbit-convert", "--recipe in", {"int4", "int8", "int3", "int2"}),
        ("lowbit-convert", "src out --eval-text ", {"file"}),
        ("lowbit-run", "model --qu", {"--quantize"}),
        ("lowbit-run", "--device c", {"cpu", "cuda"}),
        ("lowbit-run", "-t 1 --device ", {"auto", "cpu", "cuda"}),
    ],
)
def test_the_default_command_is_completed_without_its_name(
    program: str, line: str, found: set[str]
) -> None:
    assert completed(program, line) == found


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_lines_of_the_help_print_a_script(program: str, shell: str) -> None:
    said = shown(program)
    variable = re.search(rf"(\w+_COMPLETE)={shell}_source {program}", said)
    assert variable is not None
    done = CliRunner().invoke(
        PROGRAMS[program], [], prog_name=program, env={variable[1]: f"{shell}_source"}
    )
    assert done.exit_code == 0
    assert f"{variable[1]}={shell}_complete" in done.stdout
