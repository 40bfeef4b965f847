"""The vision tower against transformers in FP32, on random weights that lowbit-convert carried."""

import json
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.convert import Recipe
from lowbit.formats.architectures.vision import VisionConfig
from lowbit.formats.errors import FormatError, UnsupportedModelError
from lowbit.formats.image_settings import image_settings
from lowbit.formats.packed import open_packed
from lowbit.runtime.images.patches import ImagePatches, image_patches
from lowbit.runtime.images.positions import positions_of
from lowbit.runtime.models import vision as module
from lowbit.runtime.models.vision import (
    Affine,
    Block,
    VisionTower,
    check_settings,
    interpolation,
    load_tower,
    open_tower,
    stream,
)
from tests.conversions import convert
from tests.lanes import in_commands
from tests.runtime.hub_logits import in_bf16
from tests.runtime.images.pictures import SETTINGS, picture, saved
from tests.seeing_models import make_seeing

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "head of 72, as 9B's": {"hidden_size": 144, "num_heads": 2, "intermediate_size": 100},
    "one head, one position": {"num_heads": 1, "num_position_embeddings": 1, "depth": 1},
    "squares of nine": {"spatial_merge_size": 3, "patch_size": 8, "depth": 3},
    "one frame": {"temporal_patch_size": 1, "patch_size": 14, "num_position_embeddings": 49},
    "another base": {"rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}},
}
GRIDS = [(1, 1), (1, 5), (7, 1), (3, 4), (9, 2), (5, 13)]  # in tokens
Models = Callable[[str], tuple[Any, VisionTower]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """`models(shape)`: transformers' tower, and ours from the folder that was converted."""

    def make(shape: str) -> tuple[Any, VisionTower]:
        folder = tmp_path_factory.mktemp("seeing")
        theirs = make_seeing(folder / "source", **SHAPES[shape])
        out = convert(folder / "source", folder / "out", Recipe("int4", group_size=32)).folder
        ours = load_tower(open_tower(open_packed(out).checkpoint), "cpu", torch.float32)
        return theirs.model.visual, ours

    return cache(make)


def random_patches(tower: VisionTower, rows: int, columns: int, seed: int = 0) -> ImagePatches:
    generator = torch.Generator().manual_seed(seed)
    merge = tower.config.spatial_merge_size
    grid = (rows * merge, columns * merge)
    _, temporal, patch, _ = tower.config.patch_shape
    size = (grid[0] * patch, grid[1] * patch, 3)
    pixels = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    settings = replace(SETTINGS, patch=patch, merge=merge, temporal=temporal)
    return ImagePatches(pixels, settings)


def apart(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def layers_of(theirs: Any, image: ImagePatches) -> tuple[list[Tensor], Tensor]:
    """The input and output of each block of transformers' tower, and its tokens."""
    seen: list[Tensor] = []
    hooks = [theirs.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))]
    hooks += [b.register_forward_hook(lambda _, __, out: seen.append(out)) for b in theirs.blocks]
    made = theirs(image.values(dtype=theirs.dtype), grid_thw=torch.tensor([[1, *image.grid]]))
    for hook in hooks:
        hook.remove()
    return seen, made.pooler_output


def blocks(tower: VisionTower, x: torch.Tensor, image: ImagePatches) -> list[torch.Tensor]:
    """Output of each block."""
    made = tower.each_block(x, tower.angles(image.grid))
    return [each for each in made if each is not None]


@pytest.mark.parametrize(  # each shape with each grid, each of them both ways
    ("shape", "grid", "pieces"),
    [
        (shape, grid, "pieces" if (row + column) % 2 else "whole")
        for row, shape in enumerate(SHAPES)
        for column, grid in enumerate(GRIDS)
    ],
    ids=str,
)
def test_every_layer_is_that_of_transformers(
    models: Models,
    shape: str,
    grid: tuple[int, int],
    pieces: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if pieces == "pieces":
        monkeypatch.setattr(module, "PIECE_OPERATIONS", 1)
        monkeypatch.setattr(module, "PIECE_STEP", 7)  # a square of patches lies in two pieces
    theirs, ours = models(shape)
    image = random_patches(ours, *grid)
    layers, tokens = layers_of(theirs, image)
    x = ours.embed(image)
    assert apart(x, layers[0]) < 1e-4
    for found, expected in zip(blocks(ours, x, image), layers[1:], strict=True):
        assert apart(found, expected) < 1e-4
    assert apart(ours.merge(layers[-1]), tokens) < 1e-4
    found = ours(image)
    assert apart(found, tokens) < 1e-4
    assert found.shape == (image.tokens, 64)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_one_layer_alone_is_that_of_transformers(models: Models, grid: tuple[int, int]) -> None:
    """Each block on the input that transformers gave it, so that no error adds up."""
    theirs, ours = models("squares of nine")
    image = random_patches(ours, *grid, seed=1)
    layers, _ = layers_of(theirs, image)
    for index, block in enumerate(ours.blocks):
        [found] = blocks(replace(ours, blocks=(block,)), layers[index], image)
        assert apart(found, layers[index + 1]) < 2e-5


def test_pieces_depend_on_the_image_alone(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large image comes in pieces whether anybody waits or not, so that its bits are the same."""
    monkeypatch.setattr(module, "PIECE_OPERATIONS", 1)
    _, ours = models("plain")
    image = random_patches(ours, 15, 20)
    *between, last = ours.pieces(image)
    assert torch.equal(ours(image), last)  # type: ignore[arg-type]
    assert between.count(None) == len(between)
    pieces = -(-image.count // 128)
    assert len(between) == 1 + len(ours.blocks) * (2 * pieces + 1)
    assert len(list(ours.pieces(random_patches(ours, 2, 2)))) == 2 + len(ours.blocks)


@torch.no_grad()
def test_norms_of_small_values_are_those_of_transformers(models: Models) -> None:
    """The variance is as small as the number that is added to it."""
    theirs, ours = models("plain")
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1)) * 1e-3
    block = ours.blocks[0]
    assert apart(block.norm1.norm(x), theirs.blocks[0].norm1(x)) < 1e-5
    assert apart(block.norm2.norm(x), theirs.blocks[0].norm2(x)) < 1e-5
    assert apart(ours.merger_norm.norm(x), theirs.merger.norm(x)) < 1e-5


def test_every_part_shows_in_the_tokens(models: Models) -> None:
    """No tensor of the tower is without effect; otherwise the test above would prove nothing."""
    _, ours = models("plain")
    image = random_patches(ours, 3, 5)
    whole = ours(image)

    def without(part: Any, name: str) -> Any:
        """The part with one tensor a tenth larger and turned."""
        value = getattr(part, name)
        return replace(part, **{name: value.roll(1, -1) * 1.1})

    changed = [replace(ours, positions=ours.positions.roll(1, 0))]
    for name in ("patches", "merger_norm", "merger_up", "merger_down"):
        part = getattr(ours, name)
        changed += [replace(ours, **{name: without(part, own)}) for own in ("weight", "bias")]
    for name in ("norm1", "qkv", "out", "norm2", "up", "down"):
        part = getattr(ours.blocks[0], name)
        for own in ("weight", "bias"):
            block = replace(ours.blocks[0], **{name: without(part, own)})
            changed.append(replace(ours, blocks=(block, *ours.blocks[1:])))
    for tower in changed:
        assert apart(tower(image), whole) > 1e-3


def test_a_picture_is_read_as_transformers_reads_it(models: Models, tmp_path: Path) -> None:
    theirs, ours = models("plain")
    make_seeing(tmp_path)
    settings = image_settings(tmp_path)
    check_settings(settings, ours.config)
    rng = random.Random(4)
    for _ in range(3):
        image = picture(rng.randrange(40, 400), rng.randrange(40, 400))
        patches = image_patches(saved(image), settings)
        _, tokens = layers_of(theirs, patches)
        assert apart(ours(patches), tokens) < 1e-4


def test_an_image_has_the_same_bits_alone_and_after_others(models: Models) -> None:
    _, ours = models("plain")
    images = [random_patches(ours, *grid, seed=2) for grid in GRIDS]
    first = [ours(image) for image in images]
    for image, expected in zip(reversed(images), reversed(first), strict=True):
        assert torch.equal(ours(image), expected)


def test_bfloat16_is_as_near_as_that_of_transformers(models: Models, tmp_path: Path) -> None:
    theirs, exact = models("plain")
    make_seeing(tmp_path)
    opened = open_tower(open_packed(tmp_path).checkpoint)
    ours = load_tower(opened, "cpu", torch.bfloat16)
    assert all(block.qkv.weight.dtype == torch.bfloat16 for block in ours.blocks)
    assert opened.weight_bytes(torch.bfloat16) == sum(
        parameter.numel() * 2 for parameter in theirs.parameters()
    )
    half = in_bf16(make_seeing(tmp_path / "again").model.visual)
    for grid in GRIDS:
        image = random_patches(ours, *grid)
        expected = exact(image)
        _, tokens = layers_of(half, image)
        assert apart(ours(image).float(), expected) < 2 * apart(tokens.float(), expected) + 0.01


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of tensors that operations make and that live at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.most = dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given | self.live.keys():
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.most = max(self.most, sum(self.live.values()))
        return made


@in_commands("{'hidden_size': 400}-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [{}, {"intermediate_size": 4000}, {"hidden_size": 400}], ids=str)
def test_working_memory_is_as_stated(
    tmp_path: Path, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    make_seeing(tmp_path, **shape)
    opened = open_tower(open_packed(tmp_path).checkpoint)
    tower = load_tower(opened, "cpu", dtype)
    image = random_patches(tower, 9, 12)
    with Peak() as peak:
        tower(image)
    stated = opened.working_bytes(image.count, dtype)
    assert peak.most < 1.05 * stated
    assert peak.most > 0.8 * stated


def test_a_streamed_tower_keeps_its_blocks_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_seeing(tmp_path, depth=3)
    opened = open_tower(open_packed(tmp_path).checkpoint)
    monkeypatch.setattr(Affine, "pinned", lambda part: part)  # needs a GPU
    plain = load_tower(opened, "cpu", torch.float32)
    image = random_patches(plain, 4, 6)
    same = load_tower(opened, "cpu", torch.float32, streamed=True)
    assert torch.equal(same(image), plain(image))
    gpu = stream(plain, torch.device("meta"))  # stands in for a GPU
    assert gpu.device.type == "meta"
    assert {block.up.weight.device.type for block in gpu.blocks} == {"cpu"}
    copies: list[Block] = []
    on = Block.on

    def counted(block: Block, device: torch.device) -> Block:
        copies.append(on(block, device))
        return copies[-1]

    monkeypatch.setattr(Block, "on", counted)
    found = gpu(image)
    assert (found.device.type, found.shape) == ("meta", plain(image).shape)
    there = [copy.down.bias.device.type for copy in copies]
    assert there == ["meta"] * 3 + ["cpu"] * 3
    assert copies[3] is plain.blocks[0]  # nothing is copied where it is there


def test_a_system_that_locks_no_memory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Affine) -> Affine:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Affine, "pinned", refuse)
    make_seeing(tmp_path)
    opened = open_tower(open_packed(tmp_path).checkpoint)
    streamed = load_tower(opened, "cpu", torch.float32, streamed=True)
    image = random_patches(streamed, 4, 6)
    assert torch.equal(streamed(image), load_tower(opened, "cpu", torch.float32)(image))
    assert "memory that is not locked: CUDA error" in caplog.text


@pytest.mark.parametrize(("grid", "side"), [((4, 6), 5), ((2, 2), 48), ((50, 2), 3), ((6, 6), 6)])
def test_positions_are_interpolated_as_by_pytorch(grid: tuple[int, int], side: int) -> None:
    rows, columns = grid
    learned = torch.randn(side * side, 3, generator=torch.Generator().manual_seed(0))
    places, shares = interpolation(grid, side, 1)
    found = (learned[places] * shares[..., None]).sum(0).view(rows, columns, 3)
    expected = torch.nn.functional.interpolate(
        learned.view(1, side, side, 3).permute(0, 3, 1, 2),
        size=grid,
        mode="bilinear",
        align_corners=True,
    )[0].permute(1, 2, 0)
    assert (found - expected).abs().max() < 1e-4
    assert torch.equal(found[0, 0], learned[0])


def test_without_a_tower_the_reason_is_named(tmp_path: Path) -> None:
    make_seeing(tmp_path / "source")
    recipe = Recipe("int4", group_size=32, drop_vision=True)
    out = convert(tmp_path / "source", tmp_path / "out", recipe).folder
    with pytest.raises(UnsupportedModelError, match=r"lacks the tower's tensors") as caught:
        open_tower(open_packed(out).checkpoint)
    assert "--drop-vision" in str(caught.value.hint)


def test_a_model_for_text_has_no_tower(shorten: Callable[[str], Path]) -> None:
    checkpoint = open_packed(shorten("tiny-qwen3")).checkpoint
    with pytest.raises(UnsupportedModelError, match=r"no vision tower.*lacks `vision_config`"):
        open_tower(checkpoint)


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    make_seeing(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


QKV = "model.visual.blocks.1.attn.qkv.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(QKV), f"`{QKV}` is missing"),
        (lambda t: t.update({QKV: t[QKV][:-1]}), rf"`{QKV}`: expected shape \[144, 48\], got"),
        (lambda t: t.update({QKV: t[QKV].to(torch.int8)}), f"`{QKV}`: expected a vision tower in"),
        (
            lambda t: t.update({"model.visual.deep.weight": t[QKV][:1] + 0}),
            "tower has no such tensor",
        ),
    ],
)
def test_damaged_towers_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    checkpoint = open_packed(rewritten(tmp_path, change)).checkpoint
    with pytest.raises(FormatError, match=words):
        open_tower(checkpoint)


def test_a_tower_with_nan_is_refused(tmp_path: Path) -> None:
    folder = rewritten(tmp_path, lambda t: t[QKV][3, 3].fill_(float("nan")))
    opened = open_tower(open_packed(folder).checkpoint)
    with pytest.raises(FormatError, match=f"`{QKV}` holds NaN or Inf"):
        load_tower(opened, "cpu", torch.float32)


@pytest.mark.parametrize("key", ["patch_size", "temporal_patch_size", "merge_size"])
def test_a_processor_of_another_tower_is_refused(tmp_path: Path, key: str) -> None:
    make_seeing(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {key: content[key] + 1}))
    config = open_tower(open_packed(tmp_path).checkpoint).config
    with pytest.raises(UnsupportedModelError, match=f"processor's `{key}` is {content[key] + 1}"):
        check_settings(image_settings(tmp_path), config)


@dataclass(frozen=True)
class Span:
    start: int
    rows: int
    columns: int


def prompt_of(
    config: VisionConfig, images: list[ImagePatches], rng: random.Random
) -> tuple[Tensor, list[Span]]:
    """Ids of a prompt, with runs of text around images, and their spans."""
    ids: list[int] = []
    spans = []
    for image in images:
        ids += [rng.randrange(300) for _ in range(rng.randrange(1, 9))]
        ids.append(config.vision_start_token_id)
        spans.append(Span(len(ids), image.rows, image.columns))
        ids += [config.image_token_id] * image.tokens + [config.vision_end_token_id]
    return torch.tensor([[*ids, *(rng.randrange(300) for _ in range(5))]]), spans


def test_prompts_with_images_mean_what_they_mean_in_transformers(tmp_path: Path) -> None:
    """Embeddings of ours at positions of ours, in transformers' decoder, give its own logits."""
    theirs = make_seeing(tmp_path)
    opened = open_tower(open_packed(tmp_path).checkpoint)
    ours, settings = load_tower(opened, "cpu", torch.float32), image_settings(tmp_path)
    rng = random.Random(9)
    for count in range(1, 5):
        sizes = [(rng.randrange(30, 300), rng.randrange(30, 300)) for _ in range(count)]
        images = [image_patches(saved(picture(*size)), settings) for size in sizes]
        ids, spans = prompt_of(opened.config, images, rng)
        embeddings = theirs.model.language_model.embed_tokens(ids)
        for span, image in zip(spans, images, strict=True):
            embeddings[0, span.start : span.start + image.tokens] = ours(image)
        found = positions_of(ids.shape[1], spans)
        with torch.no_grad():
            decoder = theirs.model.language_model
            hidden = decoder(inputs_embeds=embeddings, position_ids=found.axes[:, None])[0]
            grids = torch.tensor([[1, *image.grid] for image in images])
            expected = theirs(
                input_ids=ids,
                pixel_values=torch.cat([image.values() for image in images]),
                image_grid_thw=grids,
                mm_token_type_ids=(ids == opened.config.image_token_id).int(),
            ).logits
            assert apart(theirs.lm_head(hidden), expected) < 1e-4
        assert found.delta == int(theirs.model.rope_deltas)
