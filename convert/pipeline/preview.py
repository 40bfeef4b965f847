"""Preview of a conversion, from headers and config alone: the command `plan`."""

from dataclasses import dataclass
from pathlib import Path

import torch

from lowbit.convert.calibrate.request import CalibrationRequest
from lowbit.convert.original.rotation import held_bytes
from lowbit.convert.pipeline.folder import check_small_files, passed_through
from lowbit.convert.pipeline.prospect import Prospect, look_ahead
from lowbit.convert.plan.memory import block_elements, peak_estimate
from lowbit.convert.plan.plan import Plan
from lowbit.convert.plan.readers import runtime_verdict, vllm_verdict
from lowbit.convert.plan.recipe import Recipe
from lowbit.formats.architectures import part_of, read_config
from lowbit.formats.architectures.footprint import (
    DEFAULT_CONTEXT,
    kv_vectors,
    state_bytes,
    state_count,
)
from lowbit.formats.generation import load_generation_config
from lowbit.formats.hub.ids import hub_id
from lowbit.formats.hub.locate import locate, remote_headers
from lowbit.formats.kv_cache import BF16_CACHE, INT8_CACHE
from lowbit.formats.machine.cores import core_count
from lowbit.formats.safetensors.checkpoint import open_checkpoint


@dataclass(frozen=True, slots=True)
class Preview:
    """A plan and its consequences.

    Attributes:
        source: as the user named it.
        prospect: time and memory by method, and the method that would be used.
        other_bytes: of the files passed through.
        peak_ram: resident bytes of the conversion at most, its calibration aside.
        vllm: reasons why vLLM could not load the result; empty where it can.
        unserved: reason why lowbit-run could not serve it; None where it can.
        run_bytes: bytes of its decoder's weights on a GPU.
        context: tokens that a sequence is counted with.
        sequence_bytes: keys, values and states of such a sequence in BF16, the states included that
            are on their way to the host for later prompts.
        int8_sequence_bytes: the same with keys and values in INT8.
    """

    source: str
    prospect: Prospect
    other_bytes: int
    peak_ram: int
    vllm: tuple[str, ...]
    unserved: str | None
    run_bytes: int
    context: int
    sequence_bytes: int
    int8_sequence_bytes: int

    @property
    def plan(self) -> Plan:
        """The fate of every tensor."""
        return self.prospect.plan


def preview(
    source: str,
    revision: str | None,
    recipe: Recipe,
    max_shard_bytes: int,
    *,
    automatic: bool = False,
    device: str = "cpu",
    request: CalibrationRequest | None = None,
) -> Preview:
    """Plan the conversion of a folder or a Hub id without reading a weight.

    Args:
        source: folder or Hub id.
        revision: of a Hub id.
        recipe: which linear gets which scheme.
        max_shard_bytes: limit of an output file.
        automatic: choose the method; the recipe's own is not looked at.
        device: `cpu` or `cuda`, for time and memory.
        request: the calibration text.

    Raises:
        LowbitError: whatever would stop the conversion before it starts.
    """
    on_hub = None if Path(source).exists() else hub_id(source, revision)
    if on_hub is None:
        folder = locate(source, revision).folder
        checkpoint = open_checkpoint(folder)
        config, tensors = checkpoint.config, checkpoint.tensors
        sizes = {name: (folder / name).stat().st_size for name in check_small_files(folder)}
    else:
        remote = remote_headers(*on_hub)
        config, tensors, sizes = remote.config, remote.tensors, remote.other_files
    ahead = look_ahead(
        config,
        tensors,
        recipe,
        max_shard_bytes,
        automatic=automatic,
        device=device,
        request=request or CalibrationRequest(),
    )
    plan = ahead.plan
    sizes_of = read_config(config)
    if on_hub is None:
        load_generation_config(folder, sizes_of.vocab_size)  # checks it
    context = min(sizes_of.max_position_embeddings, DEFAULT_CONTEXT)
    workers = core_count()
    held = held_bytes(plan.rotated, tensors, "cpu")
    vectors, states = kv_vectors(sizes_of, context), state_count(1) * state_bytes(sizes_of, 2)
    elements = block_elements(None, workers, torch.device("cpu"), held)
    return Preview(
        source=source,
        prospect=ahead,
        other_bytes=sum(sizes[name] for name in passed_through(sizes)),
        peak_ram=peak_estimate(elements, workers, held),
        vllm=tuple(vllm_verdict(plan)),
        unserved=runtime_verdict(plan),
        run_bytes=sum(
            step.output_bytes
            for step in plan.steps
            if part_of(config, step.source.name) == "decoder"
        ),
        context=context,
        sequence_bytes=vectors * BF16_CACHE.vector_bytes(sizes_of.head_dim) + states,
        int8_sequence_bytes=vectors * INT8_CACHE.vector_bytes(sizes_of.head_dim) + states,
    )
