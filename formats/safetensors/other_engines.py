"""Folders that are no checkpoints: what other engines run, such as exports, and adapters."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.formats.errors import CheckpointError
from lowbit.formats.fields import MAX_SHOWN
from lowbit.formats.files.reading import read_bytes
from lowbit.formats.files.strict_json import object_of

GGUF = ".gguf"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_ADAPTER_BYTES = 5_000_000


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


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder that holds changes to another model, such as LoRA weights of PEFT.

    Raises:
        CheckpointError: naming the model that it belongs to.
    """
    path = folder / ADAPTER_CONFIG
    weights = {file.name for file in folder.glob("*.safetensors")}
    if not path.is_file() or weights - {ADAPTER_WEIGHTS}:
        return
    base = object_of(read_bytes(path, MAX_ADAPTER_BYTES), path).get("base_model_name_or_path")
    named = f"`{base[:MAX_SHOWN]}`" if isinstance(base, str) and base else "its base model"
    raise CheckpointError(
        f"`{folder}` is an adapter of {named}, not a model",
        hint=f"merge it into {named} with PEFT (`merge_and_unload`), and give the saved result",
    )


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
