"""Endless patterns of config.json are stopped with a message and leave no timer running."""

import json
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from lowbit.formats import packed
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.quantization_config import QuantizationConfig, section_of
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.machine.time_limit import time_limit
from lowbit.formats.packed import open_packed

BUNDLED = Path(__file__).parents[2] / "examples/models/tiny-qwen3"
NAME = "model.layers.0.self_attn.q_proj"
ENDLESS = [
    *(r"(.+)+X$", r"(.*)*X$", r"(.|.)*X$", r"((.+)+)+X$", r"(\w+[.]?)+X$", r"(.?){25}.{25}X"),
    *("(.|.)" * 25 + "X", ".*" * 12 + "X"),
]


@pytest.mark.parametrize("pattern", ENDLESS)
def test_endless_patterns_are_stopped(pattern: str) -> None:
    config = QuantizationConfig((((f"re:{pattern}",), Scheme(4)),), ())
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(FormatError) as caught, time_limit("the work", 0.05):
        config.scheme_for(NAME * 2)
    assert str(caught.value) == "the work took longer than 0.05 s"
    assert "nested repeats" in str(caught.value.hint)
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_other_errors_and_results_pass() -> None:
    with time_limit("the work"):
        assert re.match(".*", NAME)
    with pytest.raises(KeyError), time_limit("the work"):
        raise KeyError
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_other_threads_are_not_limited() -> None:
    def work() -> None:
        with time_limit("the work", 1e-6):
            done.append(signal.getitimer(signal.ITIMER_REAL))

    done: list[Any] = []
    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert done == [(0.0, 0.0)]


def test_a_folder_with_such_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(BUNDLED, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    section = section_of({Scheme(4): ["Linear"]}, ignore=["re:(.+)+X$"])
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    monkeypatch.setattr(packed, "time_limit", partial(time_limit, seconds=0.05))
    with pytest.raises(FormatError, match="the patterns of `quantization_config` took longer"):
        open_packed(folder)
