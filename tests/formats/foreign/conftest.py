"""Fixtures: folders of one packed linear, and their weights as `lowbit.formats` reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lowbit.formats.layout.packing import dequantize, unpack, unpack_zero_point
from lowbit.formats.layout.quantization_config import read_quantization_config
from lowbit.formats.safetensors.checkpoint import Checkpoint

WriteFolder = Callable[[dict[str, Tensor], dict[str, Any]], Path]


@pytest.fixture
def write_folder(tmp_path: Path) -> WriteFolder:
    """`write_folder(tensors, section)` writes a checkpoint with that `quantization_config`."""

    def write(tensors: dict[str, Tensor], section: dict[str, Any]) -> Path:
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
        return tmp_path

    return write


@pytest.fixture
def weight_of() -> Callable[[Checkpoint, str, slice], Tensor]:
    """`weight_of(checkpoint, module, rows)` dequantizes rows of a linear of native tensors."""

    def weight(checkpoint: Checkpoint, module: str, rows: slice) -> Tensor:
        config = read_quantization_config(checkpoint.config)
        scheme = config.scheme_for(module) if config is not None else None
        assert scheme is not None
        N, K = checkpoint.read(f"{module}.weight_shape").tolist()
        start, stop, _ = rows.indices(N)
        words = checkpoint.read_rows(f"{module}.weight_packed", start, stop)
        scale = checkpoint.read_rows(f"{module}.weight_scale", start, stop)
        zero = None
        if not scheme.symmetric:
            packed = checkpoint.read(f"{module}.weight_zero_point")
            zero = unpack_zero_point(packed, scheme.bits, N)[start:stop]
        for suffix, made in {"weight_packed": words, "weight_scale": scale}.items():
            info = checkpoint.tensors[f"{module}.{suffix}"]
            assert (made.dtype, made.shape[1]) == (info.dtype, info.shape[1])
            assert info.shape[0] == N
            assert made.is_contiguous()
        assert words.dtype == torch.int32
        return dequantize(unpack(words, scheme.bits, K), scale, zero)

    return weight
