"""The start of a calibration: refused, before anything is written, where it cannot run."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lowbit.convert.calibrate.request import CalibrationRequest
from lowbit.convert.calibrate.session import Session, begin
from lowbit.convert.plan.calibration_cost import (
    Windows,
    calibration_memory,
    check_memory,
    shapes_of,
)
from lowbit.convert.plan.plan import Plan
from lowbit.formats.architectures import read_config, tensor_table
from lowbit.formats.errors import CheckpointError, UnsupportedModelError
from lowbit.formats.safetensors.checkpoint import Checkpoint
from lowbit.formats.text.tokenizer import TOKENIZER_FILE

WITHOUT = "--method rtn converts without running the original"


def begin_calibration(
    plan: Plan, checkpoint: Checkpoint, request: CalibrationRequest, device: torch.device
) -> Session:
    """The calibration of a plan.

    Args:
        plan: of the conversion.
        checkpoint: the original.
        request: the text.
        device: where to compute.

    Raises:
        UnsupportedModelError: transformers cannot run the original.
        CheckpointError: the folder has no tokenizer.
        ResourceError: it takes more memory than is free.
        LowbitError: the text cannot be used.
    """
    check_can_run(checkpoint.folder, checkpoint.config)
    text = request.read(checkpoint.folder, device)
    windows = Windows(*text.samples.shape)
    table = tensor_table(checkpoint.config, checkpoint.tensors)
    shapes = shapes_of(table, plan.schemes, read_config(checkpoint.config).experts)
    threads = torch.get_num_threads()
    need = calibration_memory(shapes, plan.recipe.method, windows, device.type, threads)
    check_memory(need, windows, device.type)
    return begin(plan, checkpoint.folder, text, device)


def is_known(model_type: str) -> bool:
    """Tell whether transformers has this architecture."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def check_can_run(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse an original that cannot be run here on a text.

    Raises:
        UnsupportedModelError: transformers does not know its architecture.
        CheckpointError: the folder has no tokenizer.
    """
    model_type = str(config.get("model_type"))
    if not is_known(model_type):
        raise UnsupportedModelError(
            f"`{folder}` cannot be calibrated: transformers {version('transformers')} does not "
            f"know model_type `{model_type}`",
            hint=WITHOUT,
        )
    if not (folder / TOKENIZER_FILE).exists():
        raise CheckpointError(
            f"`{folder}` has no {TOKENIZER_FILE}, which calibration needs", hint=WITHOUT
        )
