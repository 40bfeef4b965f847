"""Qwen3.5's vision tower: patches of an image to embeddings of its tokens.

PyTorch's own operations on one image at a time: an image has the same bits whatever stands beside
it. A block is LayerNorm, attention of all patches to all, LayerNorm, MLP. The merger makes one
token of a square of patches.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from lowbit.formats.architectures import read_vision, vision_prefix
from lowbit.formats.architectures.vision import VISION, VisionConfig, vision_shapes
from lowbit.formats.errors import FormatError, UnsupportedModelError
from lowbit.formats.image_settings import ImageSettings
from lowbit.formats.layout.packing import FLOATS
from lowbit.formats.safetensors.checkpoint import Checkpoint
from lowbit.runtime.images.patches import ImagePatches
from lowbit.runtime.models.layer_parts import last_of
from lowbit.runtime.weights.linear import DenseLinear, Linear
from lowbit.runtime.weights.weights import Weights

log = logging.getLogger("lowbit")
EPS = 1e-6  # of every LayerNorm; no config names it
BLOCKS = "blocks."  # begins the names of their tensors
PIECE_OPERATIONS = 12 * 10**9  # of a piece of a block on a CPU, some 0.1 s of two cores
PIECE_STEP = 64  # patches of which a piece has a multiple, since odd numbers of rows are slower


@dataclass(frozen=True, slots=True)
class Affine:
    """Weight and bias of a linear or a LayerNorm."""

    weight: Tensor
    bias: Tensor

    def on(self, device: torch.device) -> "Affine":
        """Weight and bias on a device."""
        weight, bias = (x.to(device, non_blocking=True) for x in (self.weight, self.bias))
        return Affine(weight, bias)

    def pinned(self) -> "Affine":
        """Copy in memory from which a GPU copies by itself."""
        return Affine(self.weight.pin_memory(), self.bias.pin_memory())

    def times(self, x: Tensor) -> Tensor:
        """Linear: [N, K] to [N, weight rows]."""
        return linear(x, self.weight, self.bias)

    def norm(self, x: Tensor) -> Tensor:
        """LayerNorm over the last dimension."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, EPS)


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of a block; h = hidden_size."""

    norm1: Affine  # [h]
    qkv: Affine  # [3 * h, h]
    out: Affine  # [h, h]
    norm2: Affine  # [h]
    up: Affine  # [intermediate_size, h]
    down: Affine  # [h, intermediate_size]

    def on(self, device: torch.device) -> "Block":
        """Copy of the block on a device; itself where it is there."""
        if self.qkv.weight.device == device:
            return self
        return Block(*(part.on(device) for part in self._parts()))

    def pinned(self) -> "Block":
        """Copy of the block in memory from which a GPU copies by itself."""
        return Block(*(part.pinned() for part in self._parts()))

    def _parts(self) -> tuple[Affine, ...]:
        return self.norm1, self.qkv, self.out, self.norm2, self.up, self.down

    def mlp(self, x: Tensor) -> Tensor:
        """Sum that the MLP adds to each patch: [N, h] to [N, h]."""
        return self.down.times(gelu(self.up.times(self.norm2.norm(x)), approximate="tanh"))


@dataclass(frozen=True, slots=True)
class VisionTower:
    """A loaded tower, on one device; its blocks may be elsewhere, and are copied for an image."""

    config: VisionConfig
    patches: Affine  # [h, values of a patch]
    positions: Tensor  # [side * side, h], learned
    blocks: tuple[Block, ...]
    merger_norm: Affine  # [h]
    merger_up: Affine  # [merged, merged]
    merger_down: Affine  # [out_hidden_size, merged]

    @property
    def device(self) -> torch.device:
        """Device that it computes on."""
        return self.patches.weight.device

    def __call__(self, image: ImagePatches) -> Tensor:
        """Embeddings of the tokens of an image: [tokens, out_hidden_size] on the tower's device."""
        return last_of(found for found in self.pieces(image) if found is not None)

    def pieces(self, image: ImagePatches) -> Iterator[Tensor | None]:
        """Embeddings in pieces, between which a CPU may do other work: None, at last the result.

        The pieces depend on the image alone, so that its bits do too.
        """
        x = self.embed(image)
        yield None
        for found in self.each_block(x, self.angles(image.grid)):
            x = x if found is None else found
            yield None
        yield self.merge(x)

    def embed(self, image: ImagePatches) -> Tensor:
        """Input of the first block: [patches, h]."""
        x = self.patches.times(image.values(self.device, self.patches.weight.dtype))
        side, merge = self.config.grid_side, self.config.spatial_merge_size
        places, shares = interpolation(image.grid, side, merge, self.device)
        learned = torch.zeros_like(x, dtype=torch.float32)
        for place, share in zip(places, shares, strict=True):
            learned += self.positions[place] * share[:, None]
        return x + learned.to(x.dtype)

    def angles(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Cosines and sines by which patches of a grid are turned: [patches, D / 2] float32."""
        angles = rotary_angles(grid, self.config, self.device)
        return angles.cos(), angles.sin()

    def each_block(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Iterator[Tensor | None]:
        """Output of each block [patches, h]; None between pieces.

        Args:
            x: [patches, h], input of the first.
            angles: of `angles`.
        """
        cos, sin = angles
        size = self._piece(len(x)) if x.device.type == "cpu" else len(x)
        for stored in self.blocks:
            block = stored.on(x.device)
            if size < len(x):
                for found in self._block_in_pieces(block, x, angles, size):
                    x = x if found is None else found
                    yield found
                continue
            x = x + block.out.times(_attend(*self._heads(block, x, cos, sin)))
            x = x + block.mlp(x)
            yield x

    def _piece(self, patches: int) -> int:
        """Patches of a piece of a block on a CPU."""
        h = self.config.hidden_size
        operations = 4 * patches * h + 2 * h * (h + 2 * self.config.intermediate_size)
        return max(PIECE_OPERATIONS // operations // PIECE_STEP, 2) * PIECE_STEP

    def _block_in_pieces(
        self, block: Block, x: Tensor, angles: tuple[Tensor, Tensor], size: int
    ) -> Iterator[Tensor | None]:
        """Output of a block behind one None for each piece of so many patches."""
        pieces = [slice(first, first + size) for first in range(0, len(x), size)]
        cos, sin = angles
        parts = []
        for piece in pieces:
            parts.append(self._heads(block, x[piece], cos[piece], sin[piece]))
            yield None
        q, k, v = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
        found = []
        for piece in pieces:
            rows = x[piece] + block.out.times(_attend(q[:, :, piece], k, v))
            found.append(rows + block.mlp(rows))
            yield None
        yield torch.cat(found)

    def _heads(
        self, block: Block, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of patches: [1, heads, N, D] each."""
        qkv = block.qkv.times(block.norm1.norm(x)).view(len(x), 3, self.config.num_heads, -1)
        if qkv.is_cuda:
            from lowbit.runtime.kernels.rotate_patches import rotate_patches  # needs triton

            rotate_patches(qkv, cos, sin)
        q, k, v = qkv.unbind(1)  # [N, heads, D]
        if not qkv.is_cuda:
            q, k = (rotate(part, cos, sin) for part in (q, k))
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        return q, k, v

    def merge(self, x: Tensor) -> Tensor:
        """Tokens of the patches that follow each other: [patches, h] to [tokens, out]."""
        squares = self.merger_norm.norm(x).view(-1, self.config.merged_size)
        return self.merger_down.times(gelu(self.merger_up.times(squares)))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of patches to all: [1, heads, n, D] and twice [1, heads, N, D] to [n, h]."""
    mixed = scaled_dot_product_attention(q, k, v)
    return mixed[0].transpose(0, 1).reshape(q.shape[2], -1)


def places_of(
    grid: tuple[int, int], merge: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, in the order of squares that become tokens: [N] int64 both."""
    rows, columns = (torch.arange(count, device=device) for count in grid)
    squares = (grid[0] // merge, merge, grid[1] // merge, merge)
    found = torch.meshgrid(rows, columns, indexing="ij")
    r, c = (part.reshape(squares).transpose(1, 2).flatten() for part in found)
    return r, c


def interpolation(
    grid: tuple[int, int], side: int, merge: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Bilinear interpolation of a square of learned positions; corners lie on its corners.

    Args:
        grid: rows and columns of patches.
        side: learned positions along a side.
        merge: patches along a side of a token.

    Returns:
        Places in the learned positions [4, patches] int64, and their shares [4, patches] float32.
    """
    taps = []
    for index, count in zip(places_of(grid, merge, device), grid, strict=True):
        # A tensor, since a GPU multiplies by the rounded inverse of a number instead of dividing.
        steps = torch.full((), max(count - 1, 1), dtype=torch.float32, device=device)
        place = index.to(torch.float32) * (side - 1) / steps
        low = place.floor().long()
        share = place - low
        taps.append(((low, 1 - share), ((low + 1).clamp(max=side - 1), share)))
    pairs = [(row, column) for row in taps[0] for column in taps[1]]
    places = torch.stack([row[0] * side + column[0] for row, column in pairs])
    return places, torch.stack([row[1] * column[1] for row, column in pairs])


def rotary_angles(
    grid: tuple[int, int], config: VisionConfig, device: torch.device | str = "cpu"
) -> Tensor:
    """Angles of the pairs of a head: the first half turns by row, the other by column.

    Returns:
        [patches, D / 2] float32.
    """
    half = config.head_dim // 2
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    frequencies = frequencies.to(device, non_blocking=True)
    places = places_of(grid, config.spatial_merge_size, device)
    return torch.cat([place[:, None].to(torch.float32) * frequencies for place in places], dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads in FP32, dimension i with i + D / 2: [N, heads, D] by [N, D / 2]."""
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


@dataclass(frozen=True, slots=True)
class OpenedTower:
    """A tower whose headers have been checked; no weight has been read."""

    checkpoint: Checkpoint
    config: VisionConfig
    prefix: str  # of its tensors

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Memory that the weights will take."""
        shapes = vision_shapes(self.config).values()
        return sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize

    def streamed_bytes(self, dtype: torch.dtype) -> int:
        """Part of the weights that a tower whose blocks are streamed has not on its GPU.

        Two blocks are there at a time: one that runs, and the next.
        """
        shapes = vision_shapes(self.config).items()
        blocks = [torch.Size(shape).numel() for name, shape in shapes if name.startswith(BLOCKS)]
        depth = self.config.depth
        return sum(blocks) * dtype.itemsize * max(0, depth - 2) // depth

    def working_bytes(self, patches: int, dtype: torch.dtype) -> int:
        """Memory beside the weights that an image of so many patches takes at its peak."""
        h, size, wide = self.config.hidden_size, dtype.itemsize, torch.float32.itemsize
        values = torch.Size(self.config.patch_shape).numel()
        frame = values // self.config.temporal_patch_size  # bytes, beside them FP32 and the type
        cutting = frame + max((wide + size) * frame, size * (frame + values), size * (values + h))
        # residual, q, k, v and a turned q; k in FP32; angles, cosines and sines
        rotation = size * 5 * h + wide * (3 * h + 2 * self.config.head_dim)
        mlp = size * (h + 2 * self.config.intermediate_size)
        return patches * max(cutting, rotation, mlp)


def open_tower(checkpoint: Checkpoint) -> OpenedTower:
    """Check the headers of a checkpoint's vision tower.

    Raises:
        UnsupportedModelError: it has none, or one with a feature that is not implemented.
        FormatError: a tensor is missing, extra, misshapen or of an unexpected dtype.
    """
    config = read_vision(checkpoint.config)
    prefix = vision_prefix(checkpoint.config, checkpoint.tensors)
    if config is None or prefix is None:
        lacks = f"`{VISION}` in its config.json" if config is None else "the tower's tensors"
        raise UnsupportedModelError(
            f"`{checkpoint.folder}` has no vision tower, so that it reads text alone: it lacks "
            f"{lacks}",
            hint="images need a Qwen3.5 with its tower, converted without --drop-vision",
        )
    opened = OpenedTower(checkpoint, config, prefix)
    _check_tensors(opened)
    return opened


def _check_tensors(opened: OpenedTower) -> None:
    """Compare the headers with the tower's table."""
    found, shapes = opened.checkpoint.tensors, vision_shapes(opened.config)
    for ending, shape in shapes.items():
        name = opened.prefix + ending
        if name not in found:
            raise FormatError(f"`{name}` is missing from `{opened.checkpoint.folder}`")
        if found[name].shape != shape:
            raise FormatError(
                f"`{name}`: expected shape {list(shape)}, got {list(found[name].shape)}"
            )
        if found[name].dtype not in FLOATS:
            raise FormatError(
                f"`{name}`: expected a vision tower in floating point, got "
                f"{found[name].dtype_name}",
                hint="convert from the original checkpoint with lowbit-convert",
            )
    for name in found:
        if name.startswith(opened.prefix) and name.removeprefix(opened.prefix) not in shapes:
            raise FormatError(f"`{name}`: the vision tower has no such tensor")


def check_settings(settings: ImageSettings, config: VisionConfig) -> None:
    """Refuse an image processor that cuts other patches than a tower reads.

    Raises:
        UnsupportedModelError: naming the size that differs.
    """
    for key, own, tower in (
        ("patch_size", settings.patch, config.patch_size),
        ("temporal_patch_size", settings.temporal, config.temporal_patch_size),
        ("merge_size", settings.merge, config.spatial_merge_size),
    ):
        if own != tower:
            raise UnsupportedModelError(
                f"the image processor's `{key}` is {own}, the vision tower's {tower}",
                hint="copy config.json and preprocessor_config.json from the same original",
            )


def load_tower(
    opened: OpenedTower, device: str, dtype: torch.dtype, streamed: bool = False
) -> VisionTower:
    """Read the weights of a tower onto `cpu` or `cuda`.

    streamed: its blocks stay in the host's memory, of which a GPU has two at a time.

    Raises:
        FormatError: a tensor holds NaN or Inf.
    """
    weights = Weights(opened.checkpoint, {}, "cpu" if streamed else device, dtype, _dense_alone)
    tower = _build(opened, weights)
    weights.check_finite()
    return stream(tower, torch.device(device)) if streamed else tower


def stream(tower: VisionTower, device: torch.device) -> VisionTower:
    """A tower in the host's memory as one that runs on a GPU, to which its blocks are copied."""
    return replace(
        tower,
        patches=tower.patches.on(device),
        positions=tower.positions.to(device),
        blocks=_pinned(tower.blocks),
        merger_norm=tower.merger_norm.on(device),
        merger_up=tower.merger_up.on(device),
        merger_down=tower.merger_down.on(device),
    )


def _pinned(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Blocks in memory from which a GPU copies by itself, if the system grants it."""
    try:
        return tuple(block.pinned() for block in blocks)
    except RuntimeError as error:  # of CUDA: a limit on what may be locked
        log.warning("the vision tower is streamed from memory that is not locked: %s", error)
        return blocks


def _dense_alone(w: Linear, paired: bool, activations: str) -> Tensor:
    """Form of a linear: its weight; nothing of a tower is packed."""
    if not isinstance(w, DenseLinear):
        raise ValueError("a vision tower has no packed linear")
    return w.weight


def _build(opened: OpenedTower, weights: Weights[Tensor]) -> VisionTower:
    def affine(name: str) -> Affine:
        name = opened.prefix + name
        weight = weights.tensor(f"{name}.weight")
        return Affine(
            weight.flatten(1) if weight.dim() > 2 else weight, weights.tensor(f"{name}.bias")
        )

    def block(index: int) -> Block:
        p = f"blocks.{index}"
        return Block(
            norm1=affine(f"{p}.norm1"),
            qkv=affine(f"{p}.attn.qkv"),
            out=affine(f"{p}.attn.proj"),
            norm2=affine(f"{p}.norm2"),
            up=affine(f"{p}.mlp.linear_fc1"),
            down=affine(f"{p}.mlp.linear_fc2"),
        )

    return VisionTower(
        config=opened.config,
        patches=affine("patch_embed.proj"),
        positions=weights.tensor(f"{opened.prefix}pos_embed.weight"),
        blocks=tuple(block(index) for index in range(opened.config.depth)),
        merger_norm=affine("merger.norm"),
        merger_up=affine("merger.linear_fc1"),
        merger_down=affine("merger.linear_fc2"),
    )
