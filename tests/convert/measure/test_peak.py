"""The memory that a comparison announces."""

from pathlib import Path

import pytest

from lowbit.convert.measure.peak import check_peak, logits_peak_bytes
from lowbit.convert.plan import memory
from lowbit.formats.errors import ResourceError
from lowbit.formats.safetensors.checkpoint import open_checkpoint

MIXTURE = Path(__file__).parents[3] / "examples/models/tiny-qwen3-moe"


@pytest.fixture(scope="module")
def hybrid() -> Path:
    return Path(__file__).parents[3] / "examples/models/tiny-qwen3.5"


def test_it_grows_with_the_text_and_is_dominated_by_it(tiny: Path) -> None:
    config = open_checkpoint(tiny).config
    short, long = (logits_peak_bytes(config, (windows, 512)) for windows in (2, 2000))
    grown = 1998 * 512
    assert 2 * 256 * 4 * grown <= long - short <= 6 * 256 * 4 * grown


def test_long_windows_count_where_they_need_more(tiny: Path) -> None:
    config = open_checkpoint(tiny).config
    many = logits_peak_bytes(config, (2000, 512))
    assert logits_peak_bytes(config, (2000, 512), (2, 8192)) == many
    few = logits_peak_bytes(config, (8, 512), threads=2)
    assert logits_peak_bytes(config, (8, 512), (2, 8192), threads=2) > few


def test_the_largest_kind_of_layer_counts(hybrid: Path) -> None:
    config = dict(open_checkpoint(hybrid).config)
    text = dict(config["text_config"])
    grown = {**config, "text_config": {**text, "linear_num_value_heads": 64}}
    assert logits_peak_bytes(grown, (1, 10)) > logits_peak_bytes(config, (1, 10))
    wide = {**config, "text_config": {**text, "num_attention_heads": 256}}
    assert logits_peak_bytes(wide, (1, 10)) > logits_peak_bytes(config, (1, 10))


def test_experts_see_the_tokens_that_are_routed_to_them() -> None:
    config = dict(open_checkpoint(MIXTURE).config)
    fewer, more = (logits_peak_bytes(config, (80, 512), watched=n) for n in (40, 80))
    common = 2 * 256 + 2 * 256 + 2 * (256 + 128) + (256 + 6)  # q, o, k and v, router
    expert = 3 * (256 + 128)
    assert more - fewer == pytest.approx(4 * 40 * 512 * (common + 2 * expert) * 5 / 4, rel=1e-3)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2_000_000_000)
    check_peak(2_000_000_000, "cpu")
    with pytest.raises(ResourceError, match=r"up to 2\.1 GB of memory, free on cpu: 2\.0 GB") as e:
        check_peak(2_100_000_000, "cpu")
    assert e.value.hint == "give a shorter --eval-text"
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    check_peak(10**15, "cpu")
