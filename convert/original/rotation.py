"""A residual stream in another basis: the same model, whose weights are easier to quantize.

In a model whose norms have no gain, x -> x R commutes with every RMS norm for an orthogonal R. So
gains are multiplied into the columns of the linears that follow, and R into every matrix that reads
the stream or writes to it; the file is a plain checkpoint with norms of one, and nothing changes at
run time (SliceGPT, Ashkboos et al., arXiv 2401.15024; QuaRot, arXiv 2404.00456). R mixes all
channels, which spreads the few loud ones over all groups of weights.

    R = S kron(C, H) / sqrt(n)        h = m n, n a power of 2, m odd

S are signs, C [m, m] a cosine transform and H [n, n] Hadamard's matrix. Both are applied element by
element, by single additions and products in a fixed order, so that a CPU and a GPU give the same
bits.

A head for multi-token prediction (MTP) reads what the trunk's head reads, and shares that head:

    x = fc [norm_e(embedding), norm_h(H)],  H = trunk's state times the final norm's gain g,
    H' = the state of x's layers times mtp.norm's gain g',  logits = W H'

Once W has taken over g, both states come without a gain. So fc's columns take over g, divided by
its root mean square because norm_h would have divided by about as much; and the stream of MTP's own
layers is scaled by D = (g' / rms g') / (g / rms g) before it is rotated, which makes W diag(g) D
proportional to W diag(g'). The norms between see a stream scaled by D: they divide by another root
mean square, by rms D for a stream whose channels are equally loud. What differs from token to token
around that changes drafts slightly, and nothing else.

Hidden states, and so adapters trained on the original, do not fit a rotated model.
"""

import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit.formats.architectures import (
    ROTATABLE,
    architecture_of,
    is_tied,
    part_of,
    prefix_of,
    tensor_table,
)
from lowbit.formats.architectures.names import (
    MTP_EMBEDDING_NORM,
    MTP_FC,
    MTP_HIDDEN_NORM,
    MTP_NORM,
    MTP_PREFIX,
    any_expert,
    split_layer,
)
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import Checkpoint, TensorInfo

HEAD = "lm_head.weight"
# Weights that are rotated at a time, where columns are. Every thread that frees pieces of 16 MB in
# RAM keeps some of them.
COLUMNS = {"cpu": 1 << 20, "cuda": 1 << 22}
KEPT = 2  # matrices with mixed rows: the last blocks of one are at work while the next is begun
HELD_BYTES = 4 * KEPT + 4  # a weight: of matrices kept, and of the one that is read
COLUMNS_BYTES = 4 * 5 * COLUMNS["cpu"]  # read, transposed, and before, in and after a sum

VISION_WRITER = re.compile(r"(?:^|\.)visual\.(?:merger|deepstack_merger_list\.\d+)\.linear_fc2\.")
LARGEST_RATIO = 16.0  # of MTP's gain to the final norm's; a channel beyond it is left as it is

Kind = Literal["reads", "writes", "gain", "joins"]
MIXED = ("writes", "joins")  # kinds whose rows belong to a stream


@dataclass(frozen=True, slots=True)
class Role:
    """The part of a tensor in the rotation."""

    # Its columns, or its rows, belong to the stream; or it is a norm's gain, of one then; or it is
    # MTP's fc, whose columns are of the trunk's stream and rows of MTP's own.
    kind: Kind
    source: str  # the tensor of the checkpoint; the embedding's for a head tied to it
    gain: str | None = None  # the norm whose gain its columns take over
    mtp: bool = False  # its stream is that of MTP's layers


@dataclass(frozen=True)
class Rotation:
    """The rotation of one checkpoint; threads may share it."""

    checkpoint: Checkpoint  # the original
    roles: Mapping[str, Role]  # of the tensors that change, by their name in the result
    _mixed: "OrderedDict[tuple[str, torch.device], Tensor]" = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def source(self, name: str) -> str:
        """The tensor of the checkpoint that a tensor of the result is made from."""
        return self.roles[name].source if name in self.roles else name

    def whole(self, name: str, device: torch.device) -> Tensor:
        """A tensor of the result, float32."""
        raw = self.checkpoint.read(self.source(name))
        if name in self.roles and self.roles[name].kind in MIXED:
            return self._mix(self.roles[name], raw, device)  # nobody asks for its rows again
        return self.rows(name, 0, raw, device)

    def rows(self, name: str, start: int, raw: Tensor, device: torch.device) -> Tensor:
        """Rows of a tensor of the result, float32.

        Args:
            raw: the same rows of its source, as stored.
        """
        role = self.roles.get(name)
        if role is None:
            return raw.to(device).to(torch.float32)
        if role.kind == "gain":
            return torch.full(raw.shape, 1.0 - self._added, device=device)
        if role.kind in MIXED:
            return self._mixed_rows(role, device)[start : start + len(raw)].clone()
        w = raw.to(device).to(torch.float32)
        if role.gain is not None:
            gain = self._gain(role.gain)
            w = w * (gain / _unit(self._ratio()) if role.mtp else gain).to(device)
        return rotated(w)

    @property
    def _added(self) -> float:
        """Number that norms add to their weight."""
        stream = architecture_of(self.checkpoint.config).stream
        return 1.0 if stream is not None and stream.zero_centred else 0.0

    def _gain(self, norm: str) -> Tensor:
        return self.checkpoint.read(norm).to(torch.float32) + self._added

    def _ratio(self) -> Tensor:
        """D of MTP's stream: [h] float32, on the CPU."""
        ratio = _unit(self._gain(MTP_NORM)) / _unit(self._gain(self._final_norm))
        size = ratio.abs()
        return torch.where((size < LARGEST_RATIO) & (size > 1 / LARGEST_RATIO), ratio, 1.0)

    @property
    def _final_norm(self) -> str:
        gain = self.roles[HEAD].gain
        if gain is None:
            raise RuntimeError("the head reads the final norm")  # a bug: `rotation_roles` says so
        return gain

    def _mixed_rows(self, role: Role, device: torch.device) -> Tensor:
        """A whole matrix with mixed rows, of which blocks are asked for."""
        key = role.source, device
        with self._lock:
            if key not in self._mixed:
                while len(self._mixed) >= KEPT:
                    self._mixed.popitem(last=False)
                self._mixed[key] = self._mix(role, self.checkpoint.read(role.source), device)
            return self._mixed[key]

    def _mix(self, role: Role, raw: Tensor, device: torch.device) -> Tensor:
        """R^T W, or R^T D W, of a stored matrix [h, K] whose output goes to the stream: float32."""
        if role.kind == "joins":
            raw = self._join(raw, device)
        return _mixed(raw, device, self._ratio() if role.mtp else None)

    def _join(self, raw: Tensor, device: torch.device) -> Tensor:
        """MTP's fc [h, 2 h] for an embedding and a state in the other basis: float32."""
        half = raw.shape[1] // 2
        state = self._gain(MTP_HIDDEN_NORM) * _unit(self._gain(self._final_norm))
        for_state = raw[:, half:].to(device).to(torch.float32) * state.to(device)
        for_embedding = raw[:, :half].to(device).to(torch.float32)
        for_embedding = for_embedding * self._gain(MTP_EMBEDDING_NORM).to(device)
        return torch.cat((rotated(for_embedding), rotated(for_state)), dim=1)


def _unit(gain: Tensor) -> Tensor:
    """A gain divided by its root mean square, on the CPU so that it has the same bits anywhere."""
    return gain / gain.square().mean().sqrt()


def rotation_roles(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Role]:
    """The tensors that a rotation changes, by their name in the result.

    A head that is tied to the embedding gets a matrix of its own.

    Raises:
        UnsupportedModelError: the family's residual stream cannot be rotated.
    """
    stream = architecture_of(config).stream
    if stream is None:
        raise UnsupportedModelError(
            f"config.json: a `{config['model_type']}` model cannot be rotated",
            hint=f"rotated are: {', '.join(ROTATABLE)}",
        )
    table = [spec for spec in tensor_table(config, names) if spec.name in names]
    decoder = prefix_of(config, names)
    final_norm = f"{decoder}norm.weight"
    embedding = next(spec.name for spec in table if spec.role == "embedding")
    roles = {
        embedding: Role("reads", embedding),
        final_norm: Role("gain", final_norm),
        HEAD: Role("reads", embedding if is_tied(config) else HEAD, final_norm),
    }
    norms = {module: norm for norm, modules in stream.readers.items() for module in modules}
    for name in (spec.name for spec in table):
        prefix, layer, rest = split_layer(name)
        module, mtp = any_expert(rest).removesuffix(".weight"), prefix == MTP_PREFIX
        if layer is None:
            continue
        if module in stream.readers:
            roles[name] = Role("gain", name)
        elif module in norms:
            gain = f"{prefix}layers.{layer}.{norms[module]}.weight"
            roles[name] = Role("reads", name, gain, mtp)
        elif module in stream.writers:
            roles[name] = Role("writes", name, mtp=mtp)
    if MTP_FC in names:
        roles |= {
            name: Role("gain", name) for name in (MTP_EMBEDDING_NORM, MTP_HIDDEN_NORM, MTP_NORM)
        }
        roles[MTP_FC] = Role("joins", MTP_FC, mtp=True)
    for name in filter(VISION_WRITER.search, names):  # what it makes of an image joins the stream
        roles[name] = Role("reads" if name.endswith(".bias") else "writes", name)
    return roles


def why_not_rotated(
    config: Mapping[str, Any], schemes: Mapping[str, Scheme | None], names: Collection[str]
) -> str | None:
    """Reason why a checkpoint cannot be rotated; None where it can.

    Args:
        names: of its tensors, without those that are dropped.
    """
    if config.get("model_type") not in ROTATABLE:
        return f"only {', '.join(ROTATABLE)} can be"
    vision = [name for name in names if part_of(config, name) == "vision"]
    if vision and not any(map(VISION_WRITER.search, vision)):
        return (
            "its vision tower has no `merger.linear_fc2` that could be rotated along "
            "(--drop-vision leaves the tower out)"
        )
    if is_tied(config) and schemes.get("lm_head") is None:
        return (
            "a head that stays the embedding cannot take over the last norm's gain "
            "(--lm-head int8 gives it weights of its own)"
        )
    return None


def rotation_bytes(
    roles: Mapping[str, Role], tensors: Mapping[str, TensorInfo], device: str
) -> int:
    """RAM beside the blocks of a conversion: matrices whose rows are mixed have to be whole.

    Args:
        roles: of the rotation; none without one.
        device: where they are mixed; a GPU leaves only the reading to RAM.
    """
    sizes = [
        math.prod(tensors[role.source].shape) * (2 if role.kind == "joins" else 1)
        for role in roles.values()
        if role.kind in MIXED
    ]
    if not sizes:
        return 0
    return max(sizes) * 4 if device == "cuda" else max(sizes) * HELD_BYTES + COLUMNS_BYTES


def _mixed(w: Tensor, device: torch.device, scales: Tensor | None) -> Tensor:
    """R^T diag(scales) W of a matrix [N, K], a few columns at a time: float32."""
    mixed = torch.empty(w.shape, device=device)
    count = max(1, COLUMNS[device.type] // len(w))
    for start in range(0, w.shape[1], count):
        columns = w[:, start : start + count].to(device).to(torch.float32)
        columns = columns if scales is None else columns * scales.to(device)[:, None]
        mixed[:, start : start + count] = rotated(columns.T.contiguous()).T
    return mixed


def rotated(x: Tensor) -> Tensor:
    """The product x R, [..., h] float32."""
    width = x.shape[-1]
    n = width & -width  # the largest power of two that divides it
    m = width // n
    y = (x * _signs(width).to(x.device)).reshape(-1, m, n)
    span = 1
    while span < n:
        pairs = y.view(-1, m, n // (2 * span), 2, span)
        first, second = pairs.unbind(3)
        y = torch.stack((first + second, first - second), 3).view(-1, m, n)
        span *= 2
    if m > 1:
        parts = []
        for column in _cosines(m):
            total = y[:, 0] * column[0]
            for number in range(1, m):
                total = total + y[:, number] * column[number]
            parts.append(total)
        y = torch.stack(parts, 1)
    return (y * (1 / math.sqrt(n))).view(x.shape)


@cache
def _signs(width: int) -> Tensor:
    """Signs that no pattern of channels agrees with, the same on every machine: [h] float32."""
    content = hashlib.shake_256(b"lowbit").digest((width + 7) // 8)
    bits = [content[number // 8] >> number % 8 & 1 for number in range(width)]
    return 1 - 2 * torch.tensor(bits, dtype=torch.float32)


@cache
def _cosines(m: int) -> tuple[tuple[float, ...], ...]:
    """Columns of the orthonormal cosine transform of m numbers (DCT-II)."""
    scale = [math.sqrt((1 if i == 0 else 2) / m) for i in range(m)]
    return tuple(
        tuple(scale[i] * math.cos(math.pi * (2 * j + 1) * i / (2 * m)) for j in range(m))
        for i in range(m)
    )
