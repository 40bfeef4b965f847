"""The speed of memory is measured on a buffer that takes no time to fill."""

import pytest

from lowbit.runtime.lab import machine_speed


@pytest.fixture(autouse=True)
def _small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine_speed.BANDWIDTH_BYTES, "cpu", 1 << 20)
