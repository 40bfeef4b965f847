"""Fixtures: modules of the page in node, a stub server, and the page in headless Chromium."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.page.stub import PAGE, Stub

VIEW = {"viewport": {"width": 1000, "height": 700}, "reduced_motion": "reduce"}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NODE = shutil.which("node")
PATIENCE_S = 60  # for a script that hangs: one takes a second

Node = Callable[..., Any]  # of the fixture `node`


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """`node("x.mjs", given, *words)`: what a script here prints as JSON about the page's modules.

    The script gets a folder with the modules and the words as arguments, and `given` on stdin.
    """
    if NODE is None:
        pytest.skip("node is not installed")
    for path in PAGE.glob("*.js"):
        shutil.copy(path, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run(script: str, given: object, *words: str) -> Any:
        done = subprocess.run(
            [str(NODE), str(Path(__file__).with_name(script)), str(tmp_path), *words],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Headless Chromium of this machine."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs chromium (apt-get install chromium)")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    """A server without key and report."""
    stub = Stub()
    yield stub
    stub.close()


@pytest.fixture
def open_page(browser: Any, stub: Stub) -> Iterator[Callable[..., Any]]:
    """`open_page(**options)` opens the page in a new context; nothing may go wrong in it."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def start(**options: Any) -> Any:
        context = browser.new_context(**{**VIEW, **options})
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if is_wrong(said) else None)
        page.goto(stub.url)
        return page

    yield start
    for context in contexts:
        context.close()
    assert not wrong


def is_wrong(said: Any) -> bool:
    """Tell if a line of the console is an error; those of refused requests are expected."""
    return said.type in ("error", "warning") and "Failed to load resource" not in said.text
