"""Reports to render, an INT4 file with every figure and variations."""

from typing import Any

import pytest

from lowbit.convert.measure.record import (
    Flip,
    Int8Inputs,
    LongQuality,
    Needle,
    Noise,
    Position,
    TextKind,
)
from lowbit.convert.mtp.drafting import Draft, Drafting


@pytest.fixture
def extras() -> dict[str, Any]:
    """Noise, positions, kinds of text, flips, drafts and inputs in eight bits."""
    return {
        "noise": Noise(0.0003, 0.0021, 0.9911),
        "positions": (
            Position(0, 128, 1000, 0.021, 0.94, 1.20, 1.22),
            Position(128, 2048, 9000, 0.016, 0.95, 1.10, 1.11, 0.0005),
        ),
        "kinds": (
            TextKind("stories", "ab" * 32, 20440, 3.286, 3.354, 0.018, 0.9427, 0.13, 0.0004),
            TextKind("maths", "ef" * 32, 5110, 6.5, 6.6, 0.024, 0.93, 0.19, 0.0011),
        ),
        "flips": (
            Flip(
                "stories",
                "Once upon a time\nthere was a",
                " little",
                " little",
                "\n",
                0.6,
                0.2,
                2.3,
            ),
            Flip("maths", "7 + 5 = ", "12", "12", "13", 0.41, 0.125, 1.1),
        ),
        "int8_inputs": (
            Int8Inputs("stories", 3.36, 0.0204, 0.15, 0.9401, 0.0005, 0.0024, 0.0001),
            Int8Inputs("maths", 6.59, 0.0231, 0.19, 0.928, 0.0011, -0.0009, 0.0004),
        ),
        "drafting": Drafting(
            8,
            (Draft(4080, 3395, 0.832, 0.832, 1.832), Draft(2601, 1578, 0.607, 0.505, 2.337)),
            (Draft(4080, 3441, 0.843, 0.843, 1.843), Draft(2633, 1650, 0.627, 0.529, 2.372)),
            (Draft(4080, 3305, 0.81, 0.81, 1.81), Draft(2501, 1488, 0.595, 0.482, 2.292)),
            1000,
            0.954,
        ),
    }


@pytest.fixture
def long() -> LongQuality:
    """Figures of long texts."""
    return LongQuality(
        length=2048,
        repeated=2,
        kl_mean=0.031,
        cache_kl_mean=0.00006,
        positions=(
            Position(0, 128, 1000, 0.021, 0.94, 1.20, 1.22),
            Position(128, 2048, 9000, 0.016, 0.95, 1.10, 1.11, 0.0005),
        ),
        cache=(
            Position(0, 128, 1000, 0.00005, 0.99, 1.22, 1.22),
            Position(128, 2048, 9000, 0.0007, 0.99, 1.11, 1.11, 0.0002),
        ),
        needles=(Needle(1900, 4, 4, 3, 3, 2), Needle(300, 4, 4, 4, 4, 4)),
    )
