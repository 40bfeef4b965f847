"""A measured report, an INT4 file with every figure that all have, for tests to vary."""

from dataclasses import replace
from typing import Any

from lowbit.convert.measure.record import (
    Histogram,
    ImageQuality,
    LogitQuality,
    QualityReport,
    Sizes,
    UsedRecipe,
    Window,
)
from lowbit.convert.measure.weights import WeightQuality

LOGITS = LogitQuality(
    text_name="a text",
    text_sha256="ab" * 32,
    text_tokens=20500,
    window=512,
    windows=40,
    scored_tokens=20440,
    perplexity_original=3.286,
    perplexity_packed=3.354,
    log_ratio_error=0.0008,
    kl_mean=0.018,
    kl_error=0.0004,
    kl_p95=0.07,
    kl_p99=0.13,
    kl_max=0.68,
    cosine_mean=0.9972,
    cosine_p1=0.9866,
    top1_agreement=0.9427,
    kl_histogram=Histogram(-8.0, 2.0, (0,) * 30 + (20000, 400, 40) + (0,) * 27),
    window_series=tuple(Window(1.1 + i / 100, 1.12 + i / 100, 0.018) for i in range(40)),
    device="cpu",
    torch_version="2.13.0",
    transformers_version="5.23.0",
)

IMAGES = ImageQuality(
    sha256="ab" * 32,
    pictures=12,
    tokens=214,
    perplexity_original=1.081,
    perplexity_packed=1.094,
    kl_mean=0.0123,
    kl_error=0.0009,
    kl_p99=0.21,
    top1_agreement=0.9907,
    read_original=11,
    read_packed=10,
)


def linear(
    name: str,
    bits: int = 4,
    error: float = 0.1,
    clipped: float = 0.01,
    output: float | None = None,
    weights: int = 65536,
    cosine: float = 0.995,
) -> WeightQuality:
    return WeightQuality(name, bits, 128, weights, cosine, error, 20.0, clipped, output)


def make_report(
    rows: tuple[WeightQuality, ...] | None = None, measured: bool = True, **figures: Any
) -> QualityReport:
    """A report of two layers and an INT8 head; keyword arguments replace fields of its logits."""
    if rows is None:
        kinds = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
        rows = tuple(linear(f"model.layers.{n}.{kind}") for n in range(2) for kind in kinds)
        rows += (linear("lm_head", bits=8, error=0.006, clipped=0.0),)
    sizes = Sizes(5_953_483, 11_828_625, 4.853)
    found = replace(LOGITS, **figures) if measured else None
    facts = ("2026-05-31", "qwen3", 5_801_216, "lowbit-convert a b")
    recipe = UsedRecipe("int4", "rtn", 128, 0)
    return QualityReport("0.1.0", "cd" * 32, sizes, rows, found, *facts, recipe=recipe)
