"""Linears of real models for a lone token as machine code for cards other than Hopper.

They take the launches that were measured on an H200. This file is also the program that compiles
them, as `test_compile` is.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.runtime.kernels.linear_launches import TIGHTEST, lone
from tests.runtime.kernels.test_compile import (
    REGISTERS,
    SHARED_LIMIT,
    Usage,
    compiled,
    outside,
    recorded,
)

CARDS = [card for card in SHARED_LIMIT if card != 90]


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("capability", "which"),
    [(86, "few"), *(pytest.param(card, "all", marks=pytest.mark.every_kernel) for card in CARDS)],
)
def test_launches_of_a_lone_token_do_not_spill(tmp_path: Path, capability: int, which: str) -> None:
    found = outside(tmp_path, f"{capability} {which}", "test_compile_lone")
    assert len(found) == len(TIGHTEST) if which == "few" else len(found) > 100
    spilled = [f"{name}: {usage}" for name, usage in found.items() if usage["stack"]]
    assert not spilled, "\n".join(spilled)
    for name, usage in found.items():
        assert usage["static"] + usage["dynamic"] <= SHARED_LIMIT[capability], name
        assert usage["registers"] * 32 * usage["warps"] <= REGISTERS, name


def machine_code(capability: int, full: bool) -> dict[str, Usage]:
    """Registers, stack and shared memory of the kernels of a lone token, by name."""
    launches = recorded(capability, lone(full))
    return {
        name: compiled(launch, capability) for name, launch in launches if launch.name == "gemv_one"
    }


if __name__ == "__main__":
    card, wanted = sys.argv[1].split()
    json.dump(machine_code(int(card), wanted == "all"), sys.stdout)
