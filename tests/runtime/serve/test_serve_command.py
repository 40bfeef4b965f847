"""`lowbit-run serve` as a process, and `lowbit-run chat --url` beside it."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from lowbit.runtime.cli.main import main
from lowbit.runtime.cli.options import load_model
from lowbit.runtime.cli.serve import _note_rounding
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.kernels.launch.card import Card
from tests.runtime.serve.conftest import BUNDLED, Running


@pytest.mark.commands
def test_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lowbit.runtime", "serve", str(BUNDLED), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--served-name", "mine", "--max-sequences", "2"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stderr is not None
    with process:
        said = ""
        while (found := re.search(r"http://127\.0\.0\.1:(\d+)", said)) is None:
            line = process.stderr.readline()
            assert line, said
            said += line
        url = f"http://127.0.0.1:{found[1]}"
        assert said.endswith(
            f"{url} has a chat page; {url}/v1 is the base URL for clients of OpenAI's API\n"
        )
        body = {"model": "mine", "prompt": "Secret words", "max_tokens": 3}
        assert httpx2.post(f"{url}/v1/completions", json=body).status_code == 200
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(20) == 0
    assert "mine: up to 2 answers at a time, context of " in said
    assert "POST /v1/completions 200" in rest
    assert "Secret" not in rest
    assert "shutting down" in rest


def test_a_number_of_sequences_that_was_chosen_is_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for sequences, said in ((None, "--sequences: 16, the default on a CPU\n"), (2, "")):
        load_model(str(BUNDLED), LoadOptions(device="cpu", max_sequences=sequences))
        assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (("--host", "0.0.0.0"), 1, "no API key"),
        (("--api-key", ""), 2, "empty"),
        (("--api-key", "  "), 2, "blanks"),
        (("--api-key", "sesame\n"), 2, "line ends"),
        (("--api-key", "ses\tame"), 2, "characters"),
        (("--host", "203.0.113.1", "--no-auth"), 1, "cannot listen"),
        (("--allow-image-urls", "https://example.org"), 1, "names no host"),
        (("--http-workers", "0"), 2, "--http-workers"),
        (("--http-workers", "65"), 2, "--http-workers"),
    ],
)
def test_refuses_to_start(options: tuple[str, ...], code: int, word: str) -> None:
    done = CliRunner().invoke(main, ("serve", str(BUNDLED), "--device", "cpu", *options))
    assert (done.exit_code, word in done.stderr) == (code, True), done.stderr


def test_windows_has_one_http_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.runtime.cli.serve.sys", SimpleNamespace(platform="win32"))
    done = CliRunner().invoke(main, ("serve", str(BUNDLED), "--http-workers", "2"))
    assert (done.exit_code, "--http-workers" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, True),
        ({"activations": "int8"}, False),
        ({"packed": False}, False),
        ({"sequences": 3}, False),
        ({"device": "cpu"}, False),
        ({"capability": (8, 9)}, False),
        ({"capability": (12, 0)}, False),
    ],
)
def test_points_to_rounded_activations_where_they_help(
    changes: dict[str, Any],
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts: dict[str, Any] = {"activations": "exact", "packed": True, "sequences": 4}
    facts |= {"device": "cuda", "capability": (9, 0), **changes}
    monkeypatch.setattr("lowbit.runtime.kernels.launch.device.card_of", Card)
    model: Any = SimpleNamespace(
        options=LoadOptions(activations=facts["activations"]),
        opened=SimpleNamespace(packs_layers=facts["packed"]),
        cache=SimpleNamespace(sequences=facts["sequences"]),
        device=facts["device"],
        engine=SimpleNamespace(runner=SimpleNamespace(tables=facts["capability"])),
    )
    _note_rounding(model)
    assert ("--activations int8" in capsys.readouterr().err) == told


def test_chat_talks_to_a_server(server: Running) -> None:
    lines = "/set temperature 0\n/think off\nTell me a story.\nGo on.\n/stats\n"
    options = ("--url", server.url, "--max-new-tokens", "12", "--system", "Be brief.")
    done = CliRunner().invoke(main, ("chat", *options), input=lines)
    assert done.exit_code == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) >= 2
    assert "12 tokens" in done.stderr
    local = ("chat", str(server.model.folder), "--device", "cpu", *options[2:])
    alone = CliRunner().invoke(main, local, input=lines)
    assert done.stdout == alone.stdout


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        ((), 2, "--url"),
        (("--url", "http://127.0.0.1:1"), 1, "running"),
        (("--url", "nonsense://x"), 1, "address"),
        (("--url", "http://x", "--device", "cpu"), 2, "loading"),
    ],
)
def test_chat_says_what_is_wrong(options: tuple[str, ...], code: int, word: str) -> None:
    done = CliRunner().invoke(main, ("chat", *options), input="Hi\n")
    assert (done.exit_code, word in done.stderr) == (code, True), done.stderr
