"""Logs that pytest catches, though it is told which loggers there are."""

import logging
from collections.abc import Iterator

import pytest
from _pytest.logging import LogCaptureHandler, catching_logs

from tests.loggers import Silent

NAME = "lowbit.silent"


@pytest.fixture
def silent() -> Iterator[logging.Logger]:
    """A logger that stops to propagate in the setup of a test."""
    logger = logging.getLogger(NAME)
    logger.propagate = False
    yield logger
    logger.propagate = True


def test_records_of_a_logger_that_does_not_propagate_are_caught(
    silent: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    silent.warning("once")
    assert caplog.messages == ["once"]


def test_a_logger_that_propagates_again_is_caught_once(silent: logging.Logger) -> None:
    found, catching = Silent(), catching_logs(LogCaptureHandler())
    found.look()
    silent.propagate = True
    found.catch(catching)
    silent.warning("once")
    catching.__exit__(None, None, None)
    assert [record.message for record in catching.handler.records] == ["once"]
