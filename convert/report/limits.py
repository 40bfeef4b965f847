"""Limits of a verdict, and the measurements that they come from."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Grade = Literal["close", "usable", "degraded", "broken"]
Scale = Literal["mean", "tail", "flips"]  # mean KL, KL p99, share of changed first choices
GRADES: tuple[Grade, ...] = ("close", "usable", "degraded", "broken")
TITLES: Mapping[Grade, str] = {
    "close": "Close to the original",
    "usable": "Usable",
    "degraded": "Degraded",
    "broken": "Broken",
}


class Limit(NamedTuple):
    """Upper limits of a grade."""

    grade: Grade
    kl: float  # mean KL, in nats per token
    flips: float  # share of tokens whose first choice changes
    evidence: str  # files within the limits, with their published or measured mean KL and flips


# Llama-3-8B: the scoreboard of llama.cpp's tools/perplexity/README.md, WikiText-2. Qwen3.5: posts
# with published GGUF files. The others: measured with this tool.
LIMITS = (
    Limit(
        "close",
        0.01,
        0.05,
        "Llama-3-8B Q8_0 0.0014 (2.3 %) and Q6_K 0.0055 (4.0 %); Qwen3.5-9B and 4B Q8_0 0.0008 and "
        "0.0028; lowbit INT8 0.0001 to 0.002",
    ),
    Limit(
        "usable",
        0.05,
        0.10,
        "Llama-3-8B Q4_K_M 0.031 (8.1 %) and Q4_K_S 0.043; Qwen3.5-9B Q4_K_M of four publishers "
        "0.009 to 0.035; Qwen3.5-4B Q4_K_M 0.029",
    ),
    Limit(
        "degraded",
        0.4,
        0.30,
        "Llama-3-8B Q4_0 0.072, Q3_K_M 0.10, Q3_K_S 0.23 and, at the edge, Q2_K 0.33 to 0.45 "
        "(28.9 %); a 0.5B model at INT4 rounded to nearest 0.21; SmolLM2-135M at INT4, calibrated, "
        "0.13",
    ),
)
# Files of these grades in plain words: what they cannot be used for.
UNUSABLE: Mapping[Grade, str] = {
    "degraded": "Not usable where each token must be right, as in code, sums and tool calls",
    "broken": "Not usable for any task",
}
BROKEN = "SmolLM2-135M at INT4 rounded to nearest 0.42, whose sentences fall apart"
# KL p99 over mean KL is 5 to 8 in published logs of 8B models.
TAIL = 10.0
SMALLEST = 50_000_000  # parameters of the smallest size in `EXPECTED`


class Expectation(NamedTuple):
    """The mean KL that a good file with so many bits reaches in models of at least a size."""

    parameters: float  # of the smallest such model
    kl: float  # nats per token
    evidence: str  # the measurement behind it


# Largest models first; small models lose more at the same recipe. Below the last size nothing is
# expected: the measured models of 6 M parameters know one kind of text and lose only 0.007 to
# 0.018, which does not carry over to others.
EXPECTED: Mapping[int, tuple[Expectation, ...]] = {
    4: (
        Expectation(3e9, 0.03, "Qwen3.5-4B Q4_K_M 0.029, Llama-3-8B Q4_K_M 0.031"),
        Expectation(1e9, 0.05, "interpolated between the sizes above and below"),
        Expectation(3e8, 0.09, "interpolated between the sizes above and below"),
        Expectation(
            SMALLEST,
            0.14,
            "SmolLM2-135M at INT4, calibrated, 0.13; llama.cpp's IQ4_XS and Q4_K_M of it, with an "
            "importance matrix and off its grid, 0.14 and 0.055",
        ),
    ),
    8: (Expectation(SMALLEST, 0.003, "Qwen3.5-4B Q8_0 0.0028; lowbit INT8 0.0001 to 0.002"),),
}
LEAST_BITS = 4  # fewer bits are expected to lose no more than 4 bits
FAR = 2.0  # factor over the expectation that counts as far


def upper_limit(limit: Limit, scale: Scale) -> float:
    """Largest figure of a grade on a scale."""
    return {"mean": limit.kl, "tail": limit.kl * TAIL, "flips": limit.flips}[scale]


def grade_of(value: float, scale: Scale = "mean") -> Grade:
    """Grade of a figure on a scale."""
    return next((limit.grade for limit in LIMITS if value <= upper_limit(limit, scale)), "broken")


def expectation(bits: int | None, parameters: float) -> Expectation | None:
    """The loss to expect of a model by its bits and size; None where none was measured.

    `bits` are those of most weights; infinite `parameters` get the strictest expectation.
    """
    if bits is None:
        return None
    rows = EXPECTED.get(max(bits, LEAST_BITS), ())
    return next((row for row in rows if parameters >= row.parameters), None)
