"""Folders and files that other engines run, such as the exports of lowbit-convert."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.formats.errors import CheckpointError

GGUF = ".gguf"


def refuse_gguf_file(path: Path) -> None:
    """Refuse a file of llama.cpp.

    Raises:
        CheckpointError: it is one, by its name.
    """
    if path.suffix.lower() == GGUF:
        raise _is_gguf(path, path)


def refuse_gguf_folder(folder: Path) -> None:
    """Refuse a folder that holds weights for llama.cpp and no others.

    Raises:
        CheckpointError: it is such a folder.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() == GGUF)
    if files and not any(folder.glob("*.safetensors")):
        raise _is_gguf(folder, files[0])


def refuse_mlx(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse weights that mlx-lm packed, or that were packed for it.

    Raises:
        CheckpointError: the config says so.
    """
    packed = config.get("quantization")
    if isinstance(packed, Mapping) and {"bits", "group_size"} <= packed.keys():
        raise CheckpointError(
            f"`{folder}` is packed for MLX, whose layout lowbit does not read",
            hint=f"mlx-lm runs it: mlx_lm.chat --model {shlex.quote(str(folder))}",
        )


def _is_gguf(place: Path, file: Path) -> CheckpointError:
    return CheckpointError(
        f"`{place}` is in the GGUF format, which lowbit does not read",
        hint=f"llama.cpp runs it: llama-cli -m {shlex.quote(str(file))}",
    )
