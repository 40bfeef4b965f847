"""Listing and handing out of tests; without a GPU Triton's kernels run in its interpreter."""

import atexit
import gc
import logging
import os
from collections.abc import Generator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from _pytest.runner import runtestprotocol

from lowbit.formats.machine.cores import core_count
from tests.lanes import mark_lanes, runs_elsewhere
from tests.loggers import Silent

LONGEST = "test_compile.py"
AUTO = "PYTEST_XDIST_AUTO_NUM_WORKERS"  # variable of xdist that sets another number
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
SILENT = Silent()
YOUNG = 10_000  # objects that are made before the collector looks for garbage; 700 in Python itself

CALM: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.function_scoped_fixture],
}
hypothesis.settings.register_profile("test", max_examples=25, **CALM)
hypothesis.settings.register_profile("nightly", max_examples=400, **CALM)
hypothesis.settings.load_profile("test")  # `--hypothesis-profile nightly` comes later


def _sees_gpu() -> bool:
    """True with a CUDA device; a PyTorch built for CPUs is not imported: that takes seconds."""
    if version("torch").endswith("+cpu"):
        return False
    import torch

    return torch.cuda.is_available()


if not _sees_gpu():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which conftest precedes


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Half as many processes again as cores: tests wait for processes, limits of time and disks."""
    if config.option.dist not in ("worksteal", "loadfile") or AUTO in os.environ:
        return None
    return core_count() * 3 // 2


def pytest_sessionstart(session: pytest.Session) -> None:
    """One that hands out tests needs no fixtures, and starts the others at once."""
    SILENT.serve_pytest()
    plugins = session.config.pluginmanager
    if not plugins.has_plugin("dsession"):
        plugins.import_plugin("tests.fixtures")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of a lane that is not asked for need not be imported: a second in each process."""
    if not collection_path.match("test_*.py"):
        return None
    return runs_elsewhere(collection_path, config.option.markexpr) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Nothing that collecting makes is garbage: the collector never looks through it.

    Through the libraries that tests import later it looks seldom: a tenth of the time was its.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _let_loggers_propagate()
        gc.freeze()
        # Python would free every object of a process that is at its end: seconds that all wait for.
        # Triton's bindings list what is frozen then as leaked.
        several = _is_one_of_several(session.config)
        atexit.register(partial(os._exit, 0) if several else gc.unfreeze)
        gc.set_threshold(YOUNG)
        gc.enable()


def _is_one_of_several(config: pytest.Config) -> bool:
    """True if xdist has started this process; a child of a test has the variable of xdist, too."""
    return hasattr(config, "workerinput")


def _let_loggers_propagate() -> None:
    """Loggers of torch, too: pytest adds its handlers, six times a test, to each that does not."""
    for name, logger in logging.getLogger().manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch":
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each of three processes begins with another file, and finds what others have compiled."""
    report = yield
    if isinstance(collector, pytest.Directory):
        first = len(report.result) * (WORKER % 3) // 3
        report.result[:] = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """The reports of a test: of one that passes, one of several processes makes the call's alone.

    Who is asked for durations gets those of fixtures, too.
    """
    SILENT.look()
    if not _is_one_of_several(item.config) or item.config.option.durations is not None:
        return None
    hook, place = item.ihook, {"nodeid": item.nodeid, "location": item.location}
    hook.pytest_runtest_logstart(**place)
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(**place)
    return True


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses among them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unknown = mark_lanes(items)
    if unknown and config.option.markexpr and not any("[" in each for each in config.args):
        raise pytest.UsageError("no test has the id that a lane names: " + ", ".join(unknown))
    # In one order everywhere; the longest first, or one of them runs alone at the end.
    items.sort(key=lambda item: (item.path.name != LONGEST, str(item.path)))
