"""Python and curl of the README and of docs/ run as they stand, on the bundled model."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lowbit.convert import Recipe
from lowbit.runtime.engine.load import load
from lowbit.runtime.state.sampling_params import SamplingParams
from tests.conversions import convert
from tests.runtime.serve.conftest import BUNDLED, Running, running, tool_model

pytestmark = pytest.mark.scripts

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
ORIGINAL, PACKED = "qwen3-8b", "qwen3-8b-int4"  # as the pages name them
ADDRESS = "http://localhost:8000"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[tuple[str, str]]:
    """Name of a page and a block of code in it, for each block of a language."""
    found = [(page.name, *block) for page in PAGES for block in BLOCK.findall(page.read_text())]
    return [(name, text) for name, language, text in found if language == kind]


def is_client(text: str) -> bool:
    return ADDRESS in text


PYTHON = blocks("python")
OWN = [text for _, text in PYTHON if not is_client(text)]
CLIENTS = [text for _, text in PYTHON if is_client(text)]
CURLS = [
    line.strip()
    for _, text in blocks("")
    for line in text.splitlines()
    if line.strip().startswith("curl ")
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundled model and its packed form, under the names of the pages."""
    folder = tmp_path_factory.mktemp("pages")
    tool_model(BUNDLED, folder / ORIGINAL)
    convert(folder / ORIGINAL, folder / PACKED, Recipe())
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Running]:
    model = load(place / PACKED, device="cpu", context=1024, max_sequences=2)
    likeliest = replace(model, defaults=SamplingParams())  # the same answers every time
    with running(likeliest, names=(PACKED,)) as found:
        yield found


def run(text: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    exec(compile(text, "page", "exec"), {"__name__": "page"})


@pytest.mark.slow
@pytest.mark.parametrize("text", OWN, ids=range(len(OWN)))
def test_python_runs(text: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(text, place, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("text", CLIENTS, ids=range(len(CLIENTS)))
def test_clients_run(
    text: str,
    place: Path,
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(text.replace(ADDRESS, server.url), place, monkeypatch)
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("line", CURLS, ids=range(len(CURLS)))
def test_curl_gets_an_answer(line: str, server: Running) -> None:
    line = line.replace("localhost:8000", server.url).replace("qwen3-1.7b-int4", PACKED)
    done = subprocess.run(
        [*shlex.split(line), "--fail-with-body", "--silent", "--max-time", "60"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("{")


def test_there_are_snippets() -> None:
    assert len(OWN) >= 9
    assert len(CLIENTS) >= 3
    assert len(CURLS) >= 2
