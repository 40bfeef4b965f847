"""Makers of processors, as systems name them, and products in BF16."""

import platform
from pathlib import Path

import pytest
import torch

from lowbit.formats.machine import cores

X86 = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: 6\nmodel name\t: {}\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (X86.format("GenuineIntel", "Intel(R) Xeon(R) Processor"), True),
        (X86.format("AuthenticAMD", "AMD EPYC 9554, no GenuineIntel"), False),
        ("processor\t: 0\nBogoMIPS\t: 243.75\nCPU implementer\t: 0x41\n", False),
        ("", False),
    ],
)
def test_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: bool) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    monkeypatch.setattr(cores, "CPUINFO", file)
    assert cores.is_intel() is expected


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", True),
        ("AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD", False),
        ("arm", False),
        ("", False),
    ],
)
def test_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, expected: bool
) -> None:
    monkeypatch.setattr(cores, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(platform, "processor", lambda: named)
    assert cores.is_intel() is expected


@pytest.mark.parametrize(
    ("mkldnn", "amx", "avx512", "intel", "expected"),
    [
        (True, False, False, True, False),
        (True, False, True, True, False),  # as fast as FP32
        (True, False, True, False, True),
        (True, True, True, True, True),
        (False, True, True, False, False),
    ],
)
def test_fast_products_in_bf16(
    mkldnn: bool,
    amx: bool,
    avx512: bool,
    intel: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: mkldnn)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(cores, "is_intel", lambda: intel)
    assert cores.multiplies_bf16.__wrapped__() is expected
