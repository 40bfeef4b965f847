"""Ranges of the figures in quality.json and bench.json: a file may come from anybody."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from lowbit.formats.errors import FormatError

INF = math.inf
SHARE = (0.0, 1.0)
POSITIVE = (0.0, INF)
COUNT = (1, INF)
NLL = (-1e-3, INF)  # nats; below zero by rounding only
COSINE = (-1.001, INF)  # infinite: a figure that was not finite

# By the name of a field, which means the same in every part of the report.
RANGES: Mapping[str, tuple[float, float]] = {
    "top1_agreement": SHARE,
    **dict.fromkeys(("clipped_share", "agreement", "accepted", "covered"), SHARE),
    **dict.fromkeys(("same_set", "same_experts", "same_set_bf16", "by_layer"), SHARE),
    **dict.fromkeys(("experts", "chosen"), COUNT),
    **dict.fromkeys(("least", "middle", "few"), POSITIVE),
    **dict.fromkeys(("reached", "drafted_windows"), COUNT),
    **dict.fromkeys(("right", "draft_rows"), POSITIVE),
    "tokens_a_round": (1.0, INF),
    "p_original": (0.0, 1.001),
    "p_packed": (0.0, 1.001),
    "cache_kl_mean": POSITIVE,
    **dict.fromkeys(("kl", "kl_mean", "kl_p95", "kl_p99", "kl_max", "kl_error"), POSITIVE),
    **dict.fromkeys(("relative_l2", "output_error", "log_ratio_error"), POSITIVE),
    **dict.fromkeys(("perplexity_original", "perplexity_packed"), (1e-3, INF)),
    **dict.fromkeys(("nll_original", "nll_packed"), NLL),
    **dict.fromkeys(("cosine", "cosine_mean", "cosine_p1"), COSINE),
    **dict.fromkeys(("windows", "scored_tokens", "text_tokens", "tokens", "weights"), COUNT),
    **dict.fromkeys(("group_size", "source_bytes", "parameters"), COUNT),
    **dict.fromkeys(("folder_bytes", "bits_per_weight", "start"), POSITIVE),
    **dict.fromkeys(("prompt_tokens", "new_tokens", "context"), COUNT),
    **dict.fromkeys(("weight_bytes", "peak_bytes", "first_token_s"), POSITIVE),
    "decode_tokens_per_s": POSITIVE,
    **dict.fromkeys(("worst_expert", "worst_expert_l2"), POSITIVE),
    "held_out_excess": (-1.0, INF),
    "window": (2, INF),
    **dict.fromkeys(("length", "repeated", "distance", "lines"), COUNT),
    **dict.fromkeys(("found_original", "found_packed", "found_bf16", "found_int8"), POSITIVE),
    "stop": COUNT,
    "bits": (1, 16),
    "low_exponent": (-300, 300),
    "high_exponent": (-300, 300),
    "counts": POSITIVE,
}
MOST_BINS = 1000


def check_ranges(part: Any, where: str) -> None:
    """Refuse a figure that cannot be, in a dataclass and in all those within.

    Raises:
        FormatError: naming the figure and its range.
    """
    for field in fields(part):
        value = getattr(part, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if is_dataclass(item):
                check_ranges(item, f"{where}: {field.name}")
            elif isinstance(item, int | float) and field.name in RANGES:
                low, high = RANGES[field.name]
                if not low <= item <= high:
                    raise FormatError(
                        f"`{where}`: `{field.name}` is {item:.6g}, expected {low:g} to {high:g}"
                    )
    _check_order(part, where)


def _check_order(part: Any, where: str) -> None:
    """Refuse ranges that are upside down, and a histogram without bins or with too many."""
    for low, high in (("start", "stop"), ("low_exponent", "high_exponent")):
        if hasattr(part, low) and getattr(part, low) >= getattr(part, high):
            raise FormatError(
                f"`{where}`: `{high}` is {getattr(part, high):g}, expected more than `{low}`, "
                f"{getattr(part, low):g}"
            )
    if hasattr(part, "counts") and not 0 < len(part.counts) <= MOST_BINS:
        raise FormatError(
            f"`{where}`: {len(part.counts)} `counts`, expected 1 to {MOST_BINS:,} of them"
        )
