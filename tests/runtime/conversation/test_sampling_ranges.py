"""Sampling settings have one range: in a file, as an option, by /set and in Python."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from lowbit.formats.errors import CheckpointError, RequestError
from lowbit.formats.generation import load_generation_config
from lowbit.formats.sampling_ranges import SEED, SETTINGS
from lowbit.runtime.cli.options import sampling_options
from lowbit.runtime.conversation.commands import Slash, run_command
from lowbit.runtime.state.sampling_params import SamplingParams
from tests.runtime.conversation.conftest import NewChat


def around(name: str) -> list[float]:
    """The bounds of a setting, and values next to them."""
    field = SETTINGS[name]
    if field.kind == "integer":
        low, high = int(field.least), int(field.most)
        return [low - 1, low, low + 1, high - 1, high, high + 1, 10**30]
    bounds = (field.least, field.most)
    near = [math.nextafter(bound, way) for bound in bounds for way in (-math.inf, math.inf)]
    return [*bounds, *near, math.nan, math.inf, -math.inf, 1e308]


@sampling_options
def parsed(**options: Any) -> None:
    """Take options."""


def accepts_option(name: str, value: float) -> bool:
    command = click.Command("parsed", params=list(reversed(parsed.__click_params__)))  # type: ignore[attr-defined]
    try:
        command.make_context("parsed", [f"--{name.replace('_', '-')}={value!r}"])
    except click.UsageError:
        return False
    return True


def accepts_file(name: str, value: float, folder: Path) -> bool:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, name: value}))
    try:
        load_generation_config(folder, 100)
    except CheckpointError:
        return False
    return True


def accepts_python(name: str, value: float) -> bool:
    values: dict[str, Any] = {name: value}
    try:
        SamplingParams(**values)
    except RequestError:
        return False
    return True


@pytest.mark.parametrize("name", SETTINGS)
def test_every_way_in_has_the_same_bounds(name: str, new_chat: NewChat, tmp_path: Path) -> None:
    chat, _ = new_chat()

    def accepts_command(value: float) -> bool:
        try:
            run_command(chat, Slash("set", f"{name} {value!r}"))
        except RequestError:
            return False
        return True

    seen = set()
    for value in around(name):
        expected = SETTINGS[name].allows(value)
        assert accepts_python(name, value) is expected, value
        assert accepts_option(name, value) is expected, value
        assert accepts_command(value) is expected, value
        if name != SEED.key:
            assert accepts_file(name, value, tmp_path) is expected, value
        seen.add(expected)
    assert seen == {False, True}


def test_every_parameter_has_a_range() -> None:
    without_option = ["logit_bias", "logprobs"]
    assert [field.name for field in fields(SamplingParams)] == [*SETTINGS, *without_option]
