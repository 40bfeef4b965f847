"""Axes of a chart: range, round steps and the names of the steps."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

TICKS = 6
LARGEST = 1e200  # beyond it, and below its inverse, steps cannot be computed
FEW_DECADES = 3
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Axis:
    """The scale along one side of a chart."""

    label: str  # with the unit
    low: float  # value at the left or lower end
    high: float  # value at the other end, above `low`
    ticks: tuple[tuple[float, str], ...]  # value and name of each
    log: bool = False  # logarithmic instead of linear

    def share(self, value: float) -> float:
        """Place of a value, from 0 at the low end to 1 at the high end; values beyond are clamped.

        >>> Axis("x", 1.0, 100.0, (), log=True).share(10.0)
        0.5
        """
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            value = math.log(max(value, self.low))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))


def linear_axis(label: str, values: Iterable[float], from_zero: bool = False) -> Axis:
    """A linear axis over the finite values, with round ticks."""
    finite = [_computable(value) for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if from_zero:
        low = min(0.0, low)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        spread = abs(high) / 2 or 1.0
        low, high = (low if from_zero else low - spread), high + spread
    step = _round_step((high - low) / TICKS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple((number * step, f"{number * step:,.6g}") for number in range(first, last + 1))
    return Axis(label, first * step, last * step, ticks)


def log_axis(label: str, low: float, high: float) -> Axis:
    """A logarithmic axis between two positive values; ticks at 1, 2 and 5 where decades are few."""
    low, high = (max(1 / LARGEST, min(LARGEST, value)) for value in (low, high))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [n for n in decades if low * 0.999 <= 10.0**n <= high * 1.001]
    if len(inside) >= FEW_DECADES:
        every = math.ceil(len(inside) / TICKS)
        ticks = tuple((10.0**n, _power(n)) for n in inside if n % every == 0)
    else:
        places = ((n, digit) for n in decades for digit in (1, 2, 5))
        found = ((digit * 10.0**n, _digit(digit, n)) for n, digit in places)
        ticks = tuple((value, name) for value, name in found if low <= value <= high)
    return Axis(label, low, max(high, low * 1.001), ticks, log=True)


def around(values: Iterable[float], room: float = 1.6, least: float = 1e-7) -> tuple[float, float]:
    """Ends of a log axis that leaves a factor of `room` around the finite values."""
    finite = [max(least, value) for value in values if math.isfinite(value)] or [1.0]
    return min(finite) / room, max(finite) * room


def _computable(value: float) -> float:
    """The value clamped to +-LARGEST; 0 where it is too small for a float to hold its steps."""
    return max(-LARGEST, min(LARGEST, value)) if abs(value) > 1 / LARGEST else 0.0


def _round_step(step: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten."""
    scale = 10.0 ** math.floor(math.log10(step))
    return next((n * scale for n in (1, 2, 2.5, 5) if n * scale >= step * 0.999), 10 * scale)


def _power(exponent: int) -> str:
    """A power of ten: `0.01`, `100`, or `10⁻⁵` where digits would be long."""
    if -3 <= exponent <= 3:
        return f"{10.0**exponent:g}"
    return "10" + str(exponent).translate(_SUPERSCRIPT)


def _digit(digit: int, exponent: int) -> str:
    """A digit times a power of ten: `0.05`, or `5·10⁻⁵` where digits would be long."""
    if -4 <= exponent <= 3:
        return f"{digit * 10.0**exponent:.6g}"
    return _power(exponent) if digit == 1 else f"{digit}·{_power(exponent)}"
