"""Fixtures: a stub server, and the page in headless Chromium."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.runtime.page.stub import Stub

VIEW = {"viewport": {"width": 1000, "height": 700}, "reduced_motion": "reduce"}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


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
