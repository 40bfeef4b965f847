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

Hidden states, and so adapters trained on the original, do not fit a rotated model.
"""

import hashlib
import math
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
    read_config,
    tensor_table,
)
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import Checkpoint, TensorInfo

HEAD = "lm_head.weight"
COLUMNS = 1 << 22  # weights that are rotated at a time, where columns are
KEPT = 2  # matrices with mixed rows: the last blocks of one are at work while the next is begun
HELD_BYTES = 4 * KEPT + 4  # a weight: of matrices kept, and of the one that is read
COLUMNS_BYTES = 4 * 4 * COLUMNS  # while they are rotated

Kind = Literal["reads", "writes", "gain"]


@dataclass(frozen=True, slots=True)
class Role:
    """The part of a tensor in the rotation.

    Attributes:
        kind: its columns, or its rows, belong to the stream; or it is a norm's gain, of one then.
        source: the tensor of the checkpoint; the embedding's for a head tied to it.
        gain: the norm whose gain its columns take over.
    """

    kind: Kind
    source: str
    gain: str | None = None


@dataclass(frozen=True)
class Rotation:
    """The rotation of one checkpoint; threads may share it.

    Attributes:
        checkpoint: the original.
        roles: of the tensors that change, by their name in the result.
    """

    checkpoint: Checkpoint
    roles: Mapping[str, Role]
    _mixed: "OrderedDict[tuple[str, torch.device], Tensor]" = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def source(self, name: str) -> str:
        """The tensor of the checkpoint that a tensor of the result is made from."""
        return self.roles[name].source if name in self.roles else name

    def whole(self, name: str, device: torch.device) -> Tensor:
        """A tensor of the result, float32."""
        raw = self.checkpoint.read(self.source(name))
        if name in self.roles and self.roles[name].kind == "writes":
            return _mixed(raw, device)  # read once: nobody asks for its rows again
        return self.rows(name, 0, raw, device)

    def rows(self, name: str, start: int, raw: Tensor, device: torch.device) -> Tensor:
        """Rows of a tensor of the result, float32.

        Args:
            name: of the tensor.
            start: number of the first row.
            raw: the same rows of its source, as stored.
            device: where to compute; the bits do not depend on it.
        """
        role = self.roles.get(name)
        if role is None:
            return raw.to(device).to(torch.float32)
        if role.kind == "gain":
            return torch.ones(raw.shape, device=device)
        if role.kind == "writes":
            return self._mixed_rows(role.source, device)[start : start + len(raw)].clone()
        w = raw.to(device).to(torch.float32)
        if role.gain is not None:
            w = w * self.checkpoint.read(role.gain).to(device).to(torch.float32)
        return rotated(w)

    def _mixed_rows(self, source: str, device: torch.device) -> Tensor:
        """R^T W of a matrix whose output goes to the stream, of which blocks are asked for."""
        key = source, device
        with self._lock:
            if key not in self._mixed:
                while len(self._mixed) >= KEPT:
                    self._mixed.popitem(last=False)
                self._mixed[key] = _mixed(self.checkpoint.read(source), device)
            return self._mixed[key]


def rotation_roles(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Role]:
    """The tensors that a rotation changes, by their name in the result.

    A head that is tied to the embedding gets a matrix of its own.

    Args:
        config: config.json of the original.
        names: of its tensors.

    Raises:
        UnsupportedModelError: the family's residual stream cannot be rotated.
    """
    stream = architecture_of(config).stream
    if stream is None:
        raise UnsupportedModelError(
            f"config.json: a `{config['model_type']}` model cannot be rotated",
            hint=f"rotated are: {', '.join(ROTATABLE)}",
        )
    table = tensor_table(config, names)
    layers, tied = read_config(config).num_hidden_layers, is_tied(config)
    decoder = prefix_of(config, names)
    final_norm = f"{decoder}norm.weight"
    embedding = next(spec.name for spec in table if spec.role == "embedding")
    roles = {embedding: Role("reads", embedding)}
    for number in range(layers):
        prefix = f"{decoder}layers.{number}."
        for norm, readers in stream.readers.items():
            gain = f"{prefix}{norm}.weight"
            roles[gain] = Role("gain", gain)
            for module in readers:
                name = f"{prefix}{module}.weight"
                roles[name] = Role("reads", name, gain)
        for module in stream.writers:
            name = f"{prefix}{module}.weight"
            roles[name] = Role("writes", name)
    roles[final_norm] = Role("gain", final_norm)
    roles[HEAD] = Role("reads", embedding if tied else HEAD, final_norm)
    return roles


def why_not_rotated(
    config: Mapping[str, Any], schemes: Mapping[str, Scheme | None], names: Collection[str]
) -> str | None:
    """Reason why a checkpoint cannot be rotated; None where it can.

    Args:
        config: config.json of the source.
        schemes: of all linears.
        names: of its tensors.
    """
    if any(part_of(config, name) == "mtp" for name in names):
        return "its head for multi-token prediction shares lm_head but not the norm before it"
    if config.get("model_type") not in ROTATABLE:
        return f"only {', '.join(ROTATABLE)} can be"
    if is_tied(config) and schemes.get("lm_head") is None:
        return "a head that stays the embedding cannot take over the last norm's gain"
    return None


def held_bytes(roles: Mapping[str, Role], tensors: Mapping[str, TensorInfo], device: str) -> int:
    """RAM beside the blocks of a conversion: matrices whose rows are mixed have to be whole.

    Args:
        roles: of the rotation; none without one.
        tensors: headers of the original.
        device: where they are mixed; a GPU leaves only the reading to RAM.
    """
    sizes = [math.prod(tensors[r.source].shape) for r in roles.values() if r.kind == "writes"]
    if not sizes:
        return 0
    return max(sizes) * 4 if device == "cuda" else max(sizes) * HELD_BYTES + COLUMNS_BYTES


def _mixed(w: Tensor, device: torch.device) -> Tensor:
    """R^T W of a stored matrix [N, K], a few columns at a time: float32."""
    mixed = torch.empty(w.shape, device=device)
    count = max(1, COLUMNS // len(w))
    for start in range(0, w.shape[1], count):
        columns = w[:, start : start + count].to(device).to(torch.float32)
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
