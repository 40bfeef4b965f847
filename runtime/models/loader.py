"""A checkpoint folder becomes a model: every tensor checked against the table, then read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lowbit.formats.activation_modes import Activations, Inputs, inputs_of
from lowbit.formats.architectures import (
    DRAFTERS,
    Config,
    architecture_of,
    is_drafter,
    kind_of,
    part_of,
    prefix_of,
    read_config,
)
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.draft_head import open_draft_head
from lowbit.formats.errors import RequestError, UnsupportedModelError
from lowbit.formats.frequent_rows import open_frequent_rows
from lowbit.formats.head_rows import PackedRows
from lowbit.formats.layout.manifest import is_rotated
from lowbit.formats.layout.packing import PACKED, SCALE
from lowbit.formats.layout.recipes import GROUP_SIZE, Base
from lowbit.formats.layout.rtn import ScaleRule
from lowbit.formats.layout.scheme import SERVED_BITS, Scheme
from lowbit.formats.packed import PackedCheckpoint, check_packed, open_packed
from lowbit.formats.safetensors.checkpoint import Checkpoint, open_checkpoint
from lowbit.runtime.backends import cpu
from lowbit.runtime.backends.cpu_linear import CpuLinear, prepare, prepared_bytes
from lowbit.runtime.backends.ops import Ops
from lowbit.runtime.models.architectures import (
    BUILD,
    DRAFTER_BUILD,
    HEADS,
    KEPT_TWICE,
    BlockDrafter,
    Model,
)
from lowbit.runtime.models.selected_rows import SelectedRows, selected_rows
from lowbit.runtime.thresholds import EXACT_TOKENS, STEP_TOKENS
from lowbit.runtime.weights.linear import Linear
from lowbit.runtime.weights.quantized import quantized
from lowbit.runtime.weights.share import ALONE, PARTIAL_ENDS, Share
from lowbit.runtime.weights.tied_head import with_own_head
from lowbit.runtime.weights.weights import Weights, served

if TYPE_CHECKING:
    from lowbit.runtime.backends.cuda_parallel import RankLinear
    from lowbit.runtime.kernels.launch.tuned import Launches
    from lowbit.runtime.kernels.linear.tiles import GpuLinear
    from lowbit.runtime.models.shared_decoder import SharedDecoder

    Decoder = Model[CpuLinear] | Model[GpuLinear] | Model[RankLinear] | SharedDecoder
    Drafter = BlockDrafter[CpuLinear] | BlockDrafter[GpuLinear]
    Rows = SelectedRows[CpuLinear] | SelectedRows[GpuLinear]
else:  # that module needs triton, which the CPU does without
    Decoder = Model
W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A folder whose headers have all been checked; no weight has been read."""

    checkpoint: Checkpoint  # the headers
    config: Config  # sizes of the model
    specs: tuple[TensorSpec, ...]  # the tensors that the model will read
    schemes: Mapping[str, Scheme | None]  # of every linear module; None where it is dense
    head: bool = False  # read the head for multi-token prediction too
    # Rows that its drafts are chosen from; None for all of the vocabulary
    draft: PackedRows | None = None
    frequent: PackedRows | None = None  # rows of the head in more bits; None without some
    drafter: "OpenedModel | None" = None  # its drafter; None without one; it excludes the head
    activations: Activations = "exact"  # inputs of its packed linears, heads aside
    rotated: bool = False  # whether hidden states are in another basis than the original's
    share: Share = ALONE  # the rank that it is the shard of, see `shards`
    head_rows: int | None = None  # rows that are kept of a drafter's heads; None for all
    # Parts of the whole model with which the first rank drafts, see `lone_head`
    lone: "OpenedModel | None" = None

    @property
    def drafts(self) -> bool:
        """True if its head for multi-token prediction is read, too."""
        return self.head or self.lone_mtp is not None

    @property
    def lone_mtp(self) -> "OpenedModel | None":
        """`lone`, if it has the head for multi-token prediction; else None."""
        return self.lone if self.lone is not None and self.lone.head else None

    def weight_bytes(self, device: str, dtype: torch.dtype) -> int:
        """Memory the weights will take on `cpu` or `cuda`."""
        size = 0 if self.draft is None else self.draft.packed.nbytes + self.draft.scale.nbytes
        size += self._frequent_bytes(device, dtype) + self.drafting_bytes(device, dtype)
        ends = KEPT_TWICE.get(kind_of(self.checkpoint.config), ())
        twice = (spec for spec in self.specs if spec.quantizable and spec.module.endswith(ends))
        size += sum(self._bytes_of(spec, device, dtype) for spec in twice)
        return size + sum(self._bytes_of(spec, device, dtype) for spec in self.specs)

    def drafting_bytes(self, device: str, dtype: torch.dtype) -> int:
        """Memory of the weights that only the first of several ranks has, to draft with."""
        beside = (each for each in (self.drafter, self.lone) if each is not None)
        return sum(each.weight_bytes(device, dtype) for each in beside)

    def token_weights(self) -> int:
        """Weights of the decoder's layers that a token is multiplied by."""
        experts, total = self.config.experts, 0.0
        for spec in self.specs:
            if spec.quantizable and spec.role not in ("head", "mtp"):
                share = experts.chosen / experts.count if experts and spec.role == "expert" else 1
                total += share * torch.Size(spec.shape).numel()
        return round(total)

    @property
    def packs_layers(self) -> bool:
        """True if a linear other than the head is packed, whose inputs may be rounded."""
        inner = (spec for spec in self.specs if spec.quantizable and spec.role != "head")
        return any(self.schemes[spec.module] for spec in inner)

    def part_tokens(self, device: str) -> int:
        """Most tokens that may pass the layers together in a decode step on `cpu` or `cuda`.

        So many give each token the bits of a lone one: any number where all linears round their
        inputs. Those of DeltaNet's gates are never packed, and are multiplied some tokens at a
        time; so are routers on a GPU alone.
        """
        heads = ("head", "mtp")
        inner = [each for each in self.specs if each.quantizable and each.role not in heads]
        rounded = self.activations == "int8" and all(self.schemes[each.module] for each in inner)
        if not rounded or (self.config.experts is not None and device == "cpu"):
            return EXACT_TOKENS
        return STEP_TOKENS

    def unread_embedding_bytes(self, device: str, dtype: torch.dtype) -> int:
        """Memory of an embedding beside a head, which a step reads some rows of."""
        if self.config.tie_word_embeddings:
            return 0
        return sum(self._bytes_of(spec, device, dtype) for spec in self.specs if spec.is_embedding)

    def expert_bytes(self, device: str, dtype: torch.dtype) -> int:
        """Memory that the experts of the decoder will take."""
        experts = (spec for spec in self.specs if spec.role == "expert")
        return sum(self._bytes_of(spec, device, dtype) for spec in experts)

    def _frequent_bytes(self, device: str, dtype: torch.dtype) -> int:
        """Memory of the head's frequent rows."""
        rows = self.frequent
        if rows is None:
            return 0
        if device != "cpu":
            return rows.packed.nbytes + rows.scale.nbytes
        N, K = len(rows.ids), self.config.hidden_size
        return prepared_bytes(N, K, rows.scheme, rows.scale.dtype, dtype)

    def _bytes_of(self, spec: TensorSpec, device: str, dtype: torch.dtype) -> int:
        if spec.is_embedding and self.schemes.get(spec.module) is not None:
            parts = (f"{spec.module}.{suffix}" for suffix in (PACKED, SCALE))
            return sum(self.checkpoint.tensors[name].nbytes for name in parts)
        if not spec.quantizable:
            wide = spec.role in architecture_of(self.checkpoint.config).float32_roles
            return torch.Size(spec.shape).numel() * (4 if wide else dtype.itemsize)
        N, K = spec.shape
        share = 1.0
        if spec.role == "head" and self.head_rows is not None:
            N, share = self.head_rows, self.head_rows / N
        stored = self.schemes[spec.module]
        if stored is None:
            # Partial sums are FP32, and so are dense weights on a CPU that they come from.
            partial = self.share.ranks > 1 and spec.module.endswith(PARTIAL_ENDS)
            return N * K * (4 if partial and device == "cpu" else dtype.itemsize)
        scheme, scale = served(stored), self.checkpoint.tensors[f"{spec.module}.{SCALE}"]
        if device == "cpu":
            exact = spec.role == "head"
            activations = "exact" if exact else self.activations
            return prepared_bytes(N, K, scheme, scale.dtype, dtype, activations)
        return N * K * scheme.bits // 8 + round(share * scale.nbytes)


def open_model(
    folder: Path,
    quantize: Base | None = None,
    group_size: int = GROUP_SIZE,
    rule: ScaleRule = "signed",
    power: Mapping[str, Tensor] | None = None,
    head: bool = False,
) -> OpenedModel:
    """Read the headers of a packed (or plain BF16) checkpoint and check every tensor once.

    Args:
        quantize: recipe by which a plain checkpoint is quantized as it is read.
        power: of the inputs, which weights the search of scales; see `quantized`.
        head: read the head for multi-token prediction too, where there is one.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
        UnsupportedModelError: the architecture, or a feature of it, is not implemented.
        FormatError: a foreign manifest, a scheme that cannot be served, or a tensor that is
            missing, extra, misshapen or of an unexpected dtype.
        QuantizationError: a recipe for a checkpoint that is quantized already, or that it does not
            fit.
    """
    if quantize is None:
        packed = with_own_head(open_packed(folder, SERVED_BITS))
    else:
        plain = open_checkpoint(folder)
        refuse_drafter(folder, plain.config)
        source = quantized(plain, quantize, group_size, rule, power)
        packed = check_packed(source, None, SERVED_BITS)
    config = packed.checkpoint.config
    refuse_drafter(folder, config)
    parts = {spec: part_of(config, spec.name) for spec in packed.specs}
    head &= "mtp" in parts.values()
    wanted = ("decoder", "mtp") if head else ("decoder",)
    return OpenedModel(
        checkpoint=packed.checkpoint,
        config=read_config(config),
        specs=tuple(spec for spec in packed.specs if parts[spec] in wanted),
        schemes=packed.schemes,
        head=head,
        draft=open_draft_head(folder, config) if head and quantize is None else None,
        frequent=None if quantize else open_frequent_rows(folder, config, packed.manifest),
        rotated=is_rotated(packed.manifest),
    )


def without_head(opened: OpenedModel) -> OpenedModel:
    """The model without its head for multi-token prediction."""
    config = opened.checkpoint.config
    specs = tuple(spec for spec in opened.specs if part_of(config, spec.name) == "decoder")
    return replace(opened, specs=specs, head=False, draft=None, lone=None)


def refuse_drafter(name: str | Path, config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that is no model of its own.

    Raises:
        UnsupportedModelError: it is a drafter.
    """
    if is_drafter(config):
        raise UnsupportedModelError(
            f"`{name}` is a drafter ({kind_of(config)}), which answers nothing by itself",
            hint="run the model that it drafts for: lowbit-run MODEL --speculate dflash --drafter "
            "DIR",
        )


def with_drafter(opened: OpenedModel, folder: Path) -> OpenedModel:
    """The model with a drafter, which drafts from the rows of its draft head if it has one.

    Raises:
        CheckpointError, FormatError, UnsupportedModelError: see `open_drafter`; or a damaged draft
            head.
    """
    checkpoint = opened.checkpoint
    draft = open_draft_head(checkpoint.folder, checkpoint.config)
    drafter = open_drafter(folder, opened)
    if draft is not None:
        drafter = replace(drafter, head_rows=len(draft.ids))
    return replace(opened, drafter=drafter, draft=draft)


def open_drafter(folder: Path, target: OpenedModel) -> OpenedModel:
    """Read the headers of a packed (or plain BF16) drafter, and check that it suits a model.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
        FormatError: see `open_packed`.
        UnsupportedModelError: no drafter, or one for another model.
    """
    return check_drafter(open_packed(folder, SERVED_BITS), folder, target)


def check_drafter(packed: PackedCheckpoint, folder: str | Path, target: OpenedModel) -> OpenedModel:
    """The drafter whose headers have been read, if it suits a model.

    Raises:
        UnsupportedModelError: no drafter, or one for another model.
    """
    content = packed.checkpoint.config
    config = read_config(content)
    blocks = config.block_drafts
    if blocks is None:
        raise UnsupportedModelError(
            f"`{folder}` is no drafter but a model of its own (`{kind_of(content)}`)",
            hint=f"`architectures` in the config.json of a drafter is one of: "
            f"{', '.join(DRAFTERS)}",
        )
    name, model = f"the drafter `{folder}`", target.config
    for what, own, other in (
        ("a vocabulary of {} tokens", config.vocab_size, model.vocab_size),
        ("hidden states of {} numbers", config.hidden_size, model.hidden_size),
        ("a model of {} layers", blocks.target_depth, model.num_hidden_layers),
    ):
        if own not in (None, other):
            raise UnsupportedModelError(
                f"{name} is for {what.format(own)}, the model has {other}",
                hint="give the drafter that was trained for this model",
            )
    # The authors' code reads the last layer after the final norm; no published drafter does.
    most = model.num_hidden_layers - 2
    highest = max(blocks.target_layers)
    if highest > most:
        raise UnsupportedModelError(
            f"{name} reads layer {highest}, the model has layers up to {most} before the last",
            hint="give the drafter that was trained for this model",
        )
    return OpenedModel(packed.checkpoint, config, packed.specs, packed.schemes)


def with_activations(opened: OpenedModel, activations: Activations) -> OpenedModel:
    """The model, and its drafter, with inputs of packed linears as named.

    Raises:
        RequestError: int8 changes no linear: nothing but heads is quantized.
    """
    drafter = opened.drafter
    packed = opened.packs_layers or (drafter is not None and drafter.packs_layers)
    if activations != "exact" and not packed:
        plain = not any(opened.schemes.values())
        recipe = ", or quantize the weights as they are read: --quantize int4" if plain else ""
        raise RequestError(
            f"`activations` {activations} changes nothing: `{opened.checkpoint.folder}` has no "
            "quantized linear, its head aside",
            hint=f"leave it out{recipe}",
        )
    drafter = drafter and replace(drafter, activations=activations)
    return replace(opened, activations=activations, drafter=drafter)


def load_decoder(
    opened: OpenedModel,
    device: str,
    dtype: torch.dtype,
    context: int,
    launches: "Launches | None" = None,
) -> Decoder:
    """Read the weights onto `cpu` or `cuda`, for sequences of up to `context` tokens.

    Raises:
        FormatError: a tensor holds NaN or Inf.
        UnsupportedModelError: the GPU's kernels have no place for the model's sizes.
    """
    if device == "cpu":
        to_cpu = cpu_weights(opened, dtype)
        on_cpu = build_decoder(opened, to_cpu, cpu, context)
        to_cpu.check_finite()
        return on_cpu
    from lowbit.runtime.backends import cuda  # needs triton and a GPU

    check_kernels(opened)
    to_cuda = cuda_weights(opened, device, dtype, launches)
    decoder = build_decoder(opened, to_cuda, cuda, context)
    to_cuda.check_finite()
    torch.cuda.empty_cache()  # buffers of rows on their way to tiles
    return decoder


def check_kernels(opened: OpenedModel) -> None:
    """Refuse a model that the GPU's kernels have no place for.

    Raises:
        UnsupportedModelError: naming the size.
    """
    from lowbit.runtime.backends import cuda  # needs triton and a GPU

    config = opened.config
    cuda.check_attention(config.head_dim, config.rotary_dim)
    linear = config.linear_layers
    if linear is not None:
        cuda.check_delta(linear.key_head_dim, linear.value_head_dim)
    if config.experts is not None:
        cuda.check_experts(config.experts, config.hidden_size)
        check_shared_experts(opened)


def load_drafter(
    opened: OpenedModel,
    device: str,
    dtype: torch.dtype,
    context: int,
    launches: "Launches | None" = None,
) -> "tuple[Drafter, Rows | None]":
    """Read the weights of a model's drafter onto `cpu` or `cuda`, for `context` tokens.

    Args:
        opened: the model.
        device: see `load_decoder`, as the rest.
        dtype: see `load_decoder`.
        context: see `load_decoder`.
        launches: see `load_decoder`.

    Returns:
        The drafter, and the rows of the model's head that drafts are chosen from; None for all.

    Raises:
        FormatError: a tensor holds NaN or Inf.
        UnsupportedModelError: the GPU's kernels have no place for the drafter's sizes.
    """
    own = opened.drafter
    if own is None:
        raise ValueError(f"`{opened.checkpoint.folder}` was opened without a drafter")
    build, config = DRAFTER_BUILD[kind_of(own.checkpoint.config)], own.config
    if device == "cpu":
        to_cpu = with_head_rows(cpu_weights(own, dtype), opened.draft)
        on_cpu = build(config, to_cpu, cpu, context), selected_rows(opened.draft, to_cpu)
        to_cpu.check_finite()
        return on_cpu
    from lowbit.runtime.backends import cuda  # needs triton and a GPU

    cuda.check_attention(config.head_dim, config.rotary_dim)
    to_cuda = with_head_rows(cuda_weights(own, device, dtype, launches), opened.draft)
    on_cuda = build(config, to_cuda, cuda, context), selected_rows(opened.draft, to_cuda)
    to_cuda.check_finite()
    torch.cuda.empty_cache()  # buffers of rows on their way to tiles
    return on_cuda


def with_head_rows(weights: Weights[W], draft: PackedRows | None) -> Weights[W]:
    """Weights of a drafter, whose heads keep the rows of a model's draft head."""
    if draft is None:
        return weights
    return replace(weights, head_rows=draft.ids.long().to(weights.device))


def cuda_weights(
    opened: OpenedModel, device: str, dtype: torch.dtype, launches: "Launches | None" = None
) -> "Weights[GpuLinear]":
    """Weights of a model or a drafter on a GPU, of its own alone."""
    from lowbit.runtime.backends import cuda  # needs triton and a GPU

    prepare = partial(cuda.prepare, launches=launches)
    return Weights(
        *(opened.checkpoint, opened.schemes, device, dtype, prepare, cuda.gathered),
        activations=opened.activations,
        rotated=opened.rotated,
    )


def cpu_weights(opened: OpenedModel, dtype: torch.dtype) -> Weights[CpuLinear]:
    """Weights of a model or a drafter on a CPU, of a single process."""

    def made(w: Linear, paired: bool, inputs: Inputs) -> CpuLinear:
        return prepare(w, dtype, inputs)

    return Weights(
        *(opened.checkpoint, opened.schemes, "cpu", dtype, made),
        activations=opened.activations,
        rotated=opened.rotated,
    )


def check_shared_experts(opened: OpenedModel) -> None:
    """Refuse a shared expert that does not fit into one buffer with the others of its layer.

    Raises:
        UnsupportedModelError: another width, scheme or dtype of scales.
    """
    for spec in opened.specs:
        if ".shared_expert." not in spec.name:
            continue
        other = spec.module.replace(".shared_expert.", ".experts.0.")
        if _kind(opened, spec.module) != _kind(opened, other):
            raise UnsupportedModelError(
                f"`{spec.module}` has no GPU kernel: expected width, scheme and dtype of scales of "
                f"`{other}`",
                hint="run on the CPU with --device cpu",
            )


def _kind(opened: OpenedModel, module: str) -> tuple[object, ...]:
    """Scheme, shapes and dtypes, which linears in one buffer must share."""
    scheme, tensors = opened.schemes[module], opened.checkpoint.tensors
    names = ["weight"] if scheme is None else [PACKED, SCALE]
    infos = [tensors[f"{module}.{name}"] for name in names]
    return scheme, *((info.shape, info.dtype) for info in infos)


def build_decoder(opened: OpenedModel, weights: Weights[W], ops: Ops[W], context: int) -> Model[W]:
    """The model of the checkpoint's architecture over the ops of one backend."""
    content = opened.checkpoint.config
    prefix = prefix_of(content, opened.checkpoint.tensors)
    model = BUILD[content["model_type"]](opened.config, prefix, weights, ops, context)
    if opened.frequent is not None:
        inputs = inputs_of(opened.activations, head=True, normed=False, rotated=opened.rotated)
        model = replace(model, frequent=selected_rows(opened.frequent, weights, inputs))
    if not opened.head:
        return model
    return HEADS[content["model_type"]](model, weights, opened.draft)
