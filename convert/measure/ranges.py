"""Ranges of the figures in quality.json and bench.json: a file may come from anybody."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from lowbit.convert.mtp.drafting import MOST_DRAFTS
from lowbit.formats.errors import FormatError

INF = math.inf
# Lowest and highest value by the name of a field, which means the same in every part of a report.
RANGES: Mapping[str, tuple[float, float]] = {
    name: bounds
    for bounds, names in (
        ((0, 1), "top1_agreement clipped_share agreement accepted covered"),
        ((0, 1), "same_set same_experts same_set_bf16 by_layer"),
        ((0, 1.001), "p_original p_packed"),
        ((0, INF), "kl kl_mean kl_p95 kl_p99 kl_max kl_error cache_kl_mean log_ratio_error"),
        ((-INF, INF), "kl_added"),
        ((0, INF), "relative_l2 output_error worst_expert worst_expert_l2 right draft_rows"),
        ((0, INF), "added_error least middle few start counts folder_bytes bits_per_weight"),
        ((0, INF), "vision_bytes vision_dropped read_original read_packed"),
        ((0, INF), "found_original found_packed found_bf16 found_int8"),
        ((0, INF), "weight_bytes peak_bytes first_token_s decode_tokens_per_s"),
        ((1, INF), "windows scored_tokens text_tokens tokens stop length repeated distance lines"),
        ((1, INF), "pictures"),
        ((1, INF), "weights parameters group_size source_bytes experts chosen"),
        ((1, INF), "reached drafted_windows tokens_a_round prompt_tokens new_tokens context"),
        ((2, INF), "window"),
        ((1, 16), "bits"),
        ((1e-3, INF), "perplexity_original perplexity_packed"),
        ((-1e-3, INF), "nll_original nll_packed"),  # nats; below zero by rounding only
        ((-1.001, INF), "cosine cosine_mean cosine_p1"),  # infinite: one that was not finite
        ((-1, INF), "held_out_excess"),
        ((-300, 300), "low_exponent high_exponent"),
    )
    for name in names.split()
}
# Fewest and most values of a list.
LENGTHS = {
    "counts": (1, 1000),
    "packed": (1, MOST_DRAFTS),
    "original": (0, MOST_DRAFTS),
    "draft_head": (0, MOST_DRAFTS),
}
ORDERED = (("start", "stop"), ("low_exponent", "high_exponent"))


def check_ranges(part: Any, where: str) -> None:
    """Refuse a figure that cannot be, in a dataclass and in all those within.

    Raises:
        FormatError: naming the figure and its range.
    """
    for field in fields(part):
        name, value = field.name, getattr(part, field.name)
        if isinstance(value, tuple) and name in LENGTHS:
            least, most = LENGTHS[name]
            if not least <= len(value) <= most:
                raise FormatError(
                    f"`{where}`: {len(value)} `{name}`, expected {least} to {most:,} of them"
                )
        for item in value if isinstance(value, tuple) else (value,):
            if is_dataclass(item):
                check_ranges(item, f"{where}: {name}")
            elif isinstance(item, int | float) and name in RANGES:
                low, high = RANGES[name]
                if not low <= item <= high:
                    raise FormatError(
                        f"`{where}`: `{name}` is {item:.6g}, expected {low:g} to {high:g}"
                    )
    for low_name, high_name in ORDERED:
        if hasattr(part, low_name) and getattr(part, low_name) >= getattr(part, high_name):
            raise FormatError(
                f"`{where}`: `{high_name}` is {getattr(part, high_name):g}, expected more than "
                f"`{low_name}`, {getattr(part, low_name):g}"
            )
