"""Figures of a measured report, for tests to vary."""

from lowbit.convert.measure.record import Histogram, LogitQuality, Window

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
