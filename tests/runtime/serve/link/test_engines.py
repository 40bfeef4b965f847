"""Engines that follow one another, or do not."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.runtime.serve.link import engines as module
from lowbit.runtime.serve.link.engines import Engines


@dataclass
class Fake:
    """An engine's process; its channel is its name."""

    channel: str
    problem: LowbitError | None = None
    stopped: bool = False
    ending: str = "signal SIGKILL"

    def stop(self) -> None:
        self.stopped = True

    async def loaded(self) -> None:
        if self.problem is not None:
            raise self.problem


def follow(engines: Engines) -> Any:
    return asyncio.run(engines.follow())


def test_another_engine_follows_one_that_has_lived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SHORT_LIFE_S", 0.0)
    first: Any = Fake("first")
    later: list[Any] = [Fake("second"), Fake("third", ResourceError("no memory is left"))]
    engines = Engines(first, lambda: later.pop(0), restarts=True)
    assert follow(engines) == "second"
    assert first.stopped
    second: Any = engines.current
    assert second.channel == "second"
    assert "the engine's process has ended: signal SIGKILL" in caplog.text
    assert follow(engines) is None
    assert second.stopped
    assert "no engine could be loaded: no memory is left" in caplog.text


@pytest.mark.parametrize(("restarts", "short_s"), [(False, 0.0), (True, 1e9)])
def test_no_engine_follows_one_that_would_end_again(
    restarts: bool, short_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHORT_LIFE_S", short_s)
    first: Any = Fake("first")
    engines = Engines(first, lambda: pytest.fail("another one was started"), restarts)
    assert follow(engines) is None


def test_an_engine_that_has_just_been_loaded_is_young() -> None:
    first: Any = Fake("first")
    second: Any = Fake("second")
    engines = Engines(first, lambda: second, restarts=True)
    engines._loaded_at -= module.SHORT_LIFE_S
    assert follow(engines) == "second"
    assert follow(engines) is None
