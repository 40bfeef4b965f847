"""The linear by `wgmma` compiles for Hopper without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "bench_wgmma.py"
STACK = 32  # bytes of a thread


@pytest.mark.kernels
def test_products_of_few_tokens_are_neither_spilled_nor_serialized(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--compile", "8", "16"],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [kernel["tokens"] for kernel in found] == [8, 16]
    for kernel in found:
        assert kernel["products"] == 32, kernel  # four for each of eight steps
        assert kernel["stack"] <= STACK, kernel
        assert kernel["waits"] == kernel["products"] // 4, kernel
