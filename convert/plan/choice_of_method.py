"""The method that `--method auto` stands for, and what the next better one brings.

All limits and claims about methods are here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lowbit.convert.plan.method import RTN, Method
from lowbit.formats.layout.scheme import Scheme

WEIGHTED, GPTQ, DISTILLED = Method("weighted"), Method("gptq"), Method("gptq", distill=True)
METHODS = (RTN, WEIGHTED, GPTQ, DISTILLED)  # that estimates are shown for, best last
LONGEST_SECONDS = 15 * 60.0  # that gptq may take on a CPU without being asked for
# Bits from which on round-to-nearest loses next to nothing: KL 0.0005 and less at 8.
PLENTY_OF_BITS = 8


@dataclass(frozen=True, slots=True)
class Gain:
    """The step from one method to the next better one.

    Attributes:
        method: the better one.
        words: what it brings.
        evidence: measurements behind the words; mean KL at INT4.
    """

    method: Method
    words: str
    evidence: str


GAINS: Mapping[Method, Gain] = {
    RTN: Gain(
        WEIGHTED,
        "the loss typically a third lower",
        "WikiText, SmolLM2-135M g64 0.428 to 0.246, Qwen2.5-Coder-0.5B g128 0.219 to 0.160",
    ),
    WEIGHTED: Gain(
        GPTQ,
        "the loss typically halved",
        "WikiText, SmolLM2-135M g64 0.246 to 0.110, Qwen2.5-Coder-0.5B g128 0.160 to 0.062",
    ),
    GPTQ: Gain(
        DISTILLED,
        "the loss typically a fifth lower",
        "bundled Qwen3 0.0084 to 0.0069, bundled Qwen3.5 0.0081 to 0.0064",
    ),
}


def automatic_method(
    schemes: Mapping[str, Scheme | None], device: str, gptq_seconds: float
) -> Method:
    """The method that `auto` stands for.

    Args:
        schemes: of all linears.
        device: `cpu` or `cuda`.
        gptq_seconds: estimated time of gptq there.
    """
    if needs_no_calibration(schemes):
        return RTN
    if device == "cuda" or gptq_seconds <= LONGEST_SECONDS:
        return GPTQ
    return WEIGHTED


def needs_no_calibration(schemes: Mapping[str, Scheme | None]) -> bool:
    """Tell whether every linear has so many bits that calibration has nothing to gain."""
    return all(scheme is None or scheme.bits >= PLENTY_OF_BITS for scheme in schemes.values())
