"""bench.json: read as `lowbit-run bench --json` prints it; foreign and stale files are not."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lowbit.convert.measure.speed import Speed, read_speed
from lowbit.formats.errors import FormatError

PRINTED: dict[str, Any] = {
    "schema": 1,
    "device": "NVIDIA H200",
    "context": 4096,
    "prompt_tokens": 64,
    "new_tokens": 128,
    "sampled": False,
    "load_s": 3.2,
    "start_s": 3.3,
    "first_token_s": 0.009,
    "decode_tokens_per_s": 830.5,
    "weight_bytes": 4_700_000_000,
    "cache_bytes": 600_000_000,
    "peak_bytes": 5_900_000_000,
    "extra_bytes": None,
    "step_bytes": 4_300_000_000,
    "bandwidth": 4.5e12,
    "roofline_share": 0.8,
    "expected_tokens_per_s": 800.0,
    "quantized_at_load": None,
    "speculation": None,
    "speculation_factor": None,
    "kv_cache": "bf16",
    "activations": "exact",
}


def save(folder: Path, **changes: Any) -> Path:
    path = folder / "bench.json"
    path.write_text(json.dumps({**PRINTED, **changes}))
    return path


def test_the_command_s_object_is_read(tmp_path: Path) -> None:
    assert read_speed(tmp_path) is None
    save(tmp_path)
    assert read_speed(tmp_path) == Speed(
        "NVIDIA H200", 64, 128, 4096, 0.009, 830.5, 4_700_000_000, 5_900_000_000
    )


def test_the_runtime_prints_what_is_read() -> None:
    from lowbit.runtime.lab.bench import BenchResult

    printed = {name for name in PRINTED if name not in ("schema", "quantized_at_load")}
    assert set(BenchResult.__dataclass_fields__) == printed


def test_of_an_earlier_conversion(tmp_path: Path) -> None:
    path = save(tmp_path)
    (tmp_path / "lowbit.json").write_text("{}")
    os.utime(path, (1, 1))
    with pytest.raises(FormatError, match=r"bench.json` is older than lowbit.json") as caught:
        read_speed(tmp_path)
    assert "lowbit-run bench" in (caught.value.hint or "")
    os.utime(tmp_path / "lowbit.json", (1, 1))
    assert read_speed(tmp_path) is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema 2, this release reads 1"),
        ({"quantized_at_load": "int4"}, "quantized at load"),
        ({"speculation": {"rounds": 3}}, "measured with --speculate"),
        ({"activations": "int8"}, "measured with --activations int8"),
        ({"device": 3}, "`device` cannot be 3"),
        ({"peak_bytes": -1}, "`peak_bytes` is -1"),
        ({"peak_bytes": 10**30}, "`peak_bytes` cannot be"),
        ({"prompt_tokens": 0}, "`prompt_tokens` is 0"),
        ({"decode_tokens_per_s": float("nan")}, "cannot be NaN"),
    ],
)
def test_foreign_content(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save(tmp_path, **changes)
    with pytest.raises(FormatError, match=message) as caught:
        read_speed(tmp_path)
    assert "or remove the file" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1}'])
def test_no_bench_result(tmp_path: Path, text: str) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(FormatError):
        read_speed(tmp_path)
