"""`lowbit-run serve --config`: what a file may say, what comes before it, what it is refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from lowbit.runtime.cli.main import main
from lowbit.runtime.cli.serve import serve

Parse = Callable[..., dict[str, Any]]


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parse:
    """`parse(text, *arguments)`: the parameters of `serve` with such a file."""
    monkeypatch.delenv("LOWBIT_API_KEY", raising=False)
    file = tmp_path / "serve.toml"

    def parameters(text: str, *arguments: str) -> dict[str, Any]:
        file.write_text(text)
        with serve.make_context("serve", ["--config", str(file), *arguments]) as context:
            return context.params

    return parameters


def test_options_come_from_the_file(parse: Parse) -> None:
    found = parse(
        """
        model = "org/name"
        host = "0.0.0.0"
        port = 8001
        api-key = "sesame"
        no-auth = true
        request-timeout = 1.5
        served-name = ["a", "b"]
        cors-origin = "https://example.org"
        group-size = 64
        context = 4096
        kv-cache = "int8"
        device = "cpu"
        speculate = "ngram"
        """
    )
    for name, value in {
        "name": "org/name",
        "host": "0.0.0.0",
        "port": 8001,
        "api_key": "sesame",
        "no_auth": True,
        "request_timeout": 1.5,
        "served_name": ("a", "b"),
        "cors_origin": ("https://example.org",),
        "group_size": 64,
        "context": 4096,
        "kv_cache": "int8",
        "device": "cpu",
        "speculate": "ngram",
    }.items():
        assert found[name] == value, name
    assert found["queue"] == parse("", "org/name")["queue"] == 64
    assert "config" not in found


def test_sequences_go_by_their_former_name_too(parse: Parse) -> None:
    for text, given, expected in (
        ("sequences = 200", (), 200),
        ("max-sequences = 200", (), 200),
        ("max-sequences = 200", ("--sequences", "3"), 3),
        ("", ("--max-sequences", "256"), 256),
        ("", (), None),  # memory decides
    ):
        assert parse(text, "org/name", *given)["max_sequences"] == expected
    with pytest.raises(click.BadParameter, match="`max-sequences` is given twice"):
        parse("sequences = 2\nmax-sequences = 2", "org/name")
    with pytest.raises(click.BadParameter, match="257 is more than 256"):
        parse("max-sequences = 257", "org/name")


def test_the_command_line_comes_first(parse: Parse) -> None:
    text = 'model = "org/name"\nport = 8001\nserved-name = ["a"]\nlog-prompts = true\n'
    found = parse(text, "other/name", "--port", "8002", "--served-name", "c")
    assert (found["name"], found["port"], found["served_name"]) == ("other/name", 8002, ("c",))
    assert found["log_prompts"] is True


def test_the_variable_comes_before_the_file(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_API_KEY", "of the variable")
    text = 'api-key = "of the file"'
    assert parse(text, "org/name")["api_key"] == "of the variable"
    given = parse(text, "org/name", "--api-key", "of the line")
    assert given["api_key"] == "of the line"


def test_folders_are_relative_to_the_file(
    parse: Parse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "mine").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    beside = str(tmp_path / "models" / "mine")
    assert parse('model = "models/mine"\ndrafter = "./models/mine"')["name"] == beside
    assert parse('drafter = "./models/mine"', "x")["drafter"] == beside
    assert parse('model = "mine"')["name"] == str(tmp_path / "mine"), "not the one of the place"
    assert parse(f'model = "{beside}"')["name"] == beside
    assert parse('model = "Org/Name@v1"')["name"] == "Org/Name@v1"
    assert parse('model = "https://huggingface.co/Org/Name"')["name"] == "Org/Name"
    assert parse("", "mine")["name"] == "mine", "of the command line, which is of the place"


def test_every_option_may_stand_in_a_file(parse: Parse) -> None:
    for parameter in serve.params:
        if isinstance(parameter, click.Option) and parameter.name not in ("config", "debug"):
            key = parameter.opts[0].removeprefix("--")
            with pytest.raises(click.BadParameter, match=f"`{key}`: expected"):
                parse(f"{key} = [{{}}]", "org/name")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 3", "there is no option `prot`; did you mean `port`?"),
        ("api_key = 'x'", "did you mean `api-key`?"),
        ("xyzzy = 1", "there is no option `xyzzy`."),
        ("config = 'other.toml'", "there is no option `config`"),
        ("debug = true", "there is no option `debug`"),
        ("[serve]\nport = 1", "there is no option `serve`"),
        ("port = 99999", "`port`: 99999 is not in the range"),
        ("port = 'eighty'", "`port`: 'eighty' is not a valid integer range"),
        ("port = true", "`port`: expected a text or a number."),
        ("port = 1979-05-27", "`port`: expected a text or a number."),
        ("no-auth = 'false'", "`no-auth`: expected true or false."),
        ("no-auth = 1", "`no-auth`: expected true or false."),
        ("kv-cache = 'int3'", "`kv-cache`: 'int3' is not one of"),
        ("request-timeout = nan", "`request-timeout`: nan is not a finite number."),
        ("threads = 100000", "`threads`: 100000 is more than the"),
        ("served-name = [1, [2]]", "`served-name`: expected a text or a number."),
        ("port = 1\nport = 2", "is no TOML"),
        ("port 1", "is no TOML"),
        ("x = " + "[" * 5000, "is no TOML"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    done = CliRunner().invoke(main, ("serve", "org/name", "--config", str(file)))
    assert done.exit_code == 2
    assert words in done.stderr
    assert str(file) in done.stderr
    assert "Traceback" not in done.stderr


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"host = '\xff'")
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("missing", "No such file"), (".", "folder"), ("latin", "is no TOML")):
        done = CliRunner().invoke(main, ("serve", "x/y", "--config", str(tmp_path / name)))
        assert (done.exit_code, words in done.stderr) == (2, True), done.stderr


def test_a_model_is_needed_somewhere(parse: Parse) -> None:
    with pytest.raises(click.MissingParameter):
        parse("port = 1")
