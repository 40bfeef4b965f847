"""A packed checkpoint against its original on answers about pictures."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.measure.logits import compare, work
from lowbit.convert.measure.measure import check_finite, load_models
from lowbit.convert.measure.metrics import TokenFigures, percentile
from lowbit.convert.measure.pair import Pair
from lowbit.convert.measure.record import ImageQuality
from lowbit.convert.measure.uncertainty import mean_error
from lowbit.convert.original.device import open_device
from lowbit.convert.original.model import SeenImages
from lowbit.convert.original.progress import Meter, Note, Progress, silent
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.vision import embed_images, load_tower, patches_of
from lowbit.convert.original.weights import Weights
from lowbit.convert.plan.memory import check_free, logits_peak_bytes
from lowbit.convert.texts.pictures import PICTURES, SIZE, pictures_sha256
from lowbit.formats.architectures import read_config, read_vision, vision_prefix
from lowbit.formats.architectures.vision import VISION, VisionConfig, vision_shapes
from lowbit.formats.errors import LowbitError, ResourceError, UnsupportedModelError
from lowbit.formats.image_settings import ImageSettings, image_settings
from lowbit.formats.machine.system import install_hint
from lowbit.formats.text.tokenizer import load_text_tokenizer

BEFORE, BETWEEN = "<|im_start|>user\n", "\n"
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
MOST_PATCHES = 8192  # of a picture; Qwen3.5's are 280
MOST_GROWTH = 16  # of a picture's pixels: a processor that enlarges it more is not run


@dataclass(frozen=True, slots=True)
class PicturePrompts:
    """Prompts about the pictures with their answers, all of one layout."""

    windows: Tensor  # [pictures, T] int64, the shorter ones filled up
    answers: tuple[slice, ...]  # tokens of each answer
    start: int  # index of the first token of a picture
    grid: tuple[int, int]  # rows and columns of its tokens
    patches: Tensor  # of all pictures
    grids: Tensor  # [pictures, 3]

    @property
    def scored(self) -> Tensor:
        """Places of the answers' tokens among the figures, which begin with a second token."""
        T = self.windows.shape[1] - 1
        return torch.cat(
            [
                torch.arange(part.start - 1, part.stop - 1) + number * T
                for number, part in enumerate(self.answers)
            ]
        )

    @property
    def labels(self) -> Tensor:
        """The answers' tokens behind one another: [tokens] int64."""
        return torch.cat([row[part] for row, part in zip(self.windows, self.answers, strict=True)])

    def by_answer(self, values: Tensor) -> Sequence[Tensor]:
        """Values of the answers' tokens, for each answer."""
        ends = accumulate(part.stop - part.start for part in self.answers)
        return values.tensor_split(list(ends)[:-1])

    @property
    def positions(self) -> Tensor:
        """Time, row and column of every token: [3, T] int64."""
        rows, columns = self.grid
        count, T = rows * columns, self.windows.shape[1]
        index = torch.arange(count)
        image = torch.stack([torch.zeros_like(index), index // columns, index % columns])
        text = torch.arange(T - self.start - count) + max(rows, columns)
        return torch.cat(
            [
                torch.arange(self.start).expand(3, -1),
                self.start + image,
                self.start + text.expand(3, -1),
            ],
            dim=1,
        )


def measure_images(
    pair: Pair, device: str = "cpu", progress: Progress = silent, note: Note | None = None
) -> ImageQuality | None:
    """Figures of the packed model on the answers about the bundled pictures.

    Args:
        pair: the original, with tokenizer.json and its image processor's settings, and the folder
            made from it.
        progress: called with ("images", work done, in all), in weights times tokens.
        note: told why nothing is measured where both have a vision tower.

    Returns:
        None where one of them has no vision tower, or the pictures cannot be shown to them.

    Raises:
        CheckpointError, FormatError: weights that cannot be read.
        QuantizationError: a model gives NaN or infinite logits.
    """
    if not (_sees(pair.original) and _sees(pair.packed)):
        return None
    target = open_device(device)
    with torch.inference_mode(), without_advice():
        try:
            prompts = _prompts(pair.original)
            _check_memory(pair.original, prompts, device)
            original = _seen(pair.original, prompts, target)
        except LowbitError as error:
            if note is not None:
                hint = f"; {error.hint}" if error.hint else ""
                note(f"answers about pictures are not compared: {error}{hint}")
            return None
        seen = original, _seen(pair.packed, prompts, target)
        models = load_models(pair, prompts.windows.shape[1], target, seen)
        meter = Meter(progress, "images", work(models[0], prompts.windows))
        meter.add(0)
        figures = compare(models, prompts.windows, target, meter.add).figures
    answers = figures.part(prompts.scored)
    check_finite(answers, pair)
    return _summarize(answers, prompts)


def _sees(weights: Weights) -> bool:
    config, tensors = weights.checkpoint.config, weights.checkpoint.tensors
    return vision_prefix(config, tensors) is not None and VISION in config


def _vision_of(weights: Weights) -> VisionConfig:
    found = read_vision(weights.checkpoint.config)
    if found is None:
        raise UnsupportedModelError(f"`{weights.name}` has no vision tower")
    return found


def _prompts(original: Weights) -> PicturePrompts:
    """The pictures as an original's processor and tokenizer take them.

    Raises:
        LowbitError: they cannot be shown to it.
    """
    vision, folder = _vision_of(original), original.checkpoint.folder
    settings = image_settings(folder)
    _check_settings(settings, vision)
    patches, grids = patches_of([_opened(asked.content) for asked in PICTURES], settings)
    each = len(patches) // len(PICTURES)
    if each > MOST_PATCHES:
        raise UnsupportedModelError(f"the image processor makes {each} patches of a small picture")
    rows, columns = (int(count) // settings.merge for count in grids[0, 1:])
    tokenizer = load_text_tokenizer(folder, "the report on images")
    before = [*tokenizer.encode(BEFORE), vision.vision_start_token_id]
    image = [vision.image_token_id] * (rows * columns) + [vision.vision_end_token_id]
    texts, answers = [], []
    for asked in PICTURES:
        question = tokenizer.encode(f"{BETWEEN}{asked.question}{AFTER}")
        answer = tokenizer.encode(asked.answer)
        texts.append([*before, *image, *question, *answer])
        answers.append(slice(len(texts[-1]) - len(answer), len(texts[-1])))
    length = max(map(len, texts))
    context = read_config(original.checkpoint.config).max_position_embeddings
    if length > context:
        raise UnsupportedModelError(f"they take {length} tokens, the context is {context}")
    windows = torch.tensor([text + [text[-1]] * (length - len(text)) for text in texts])
    return PicturePrompts(windows, tuple(answers), len(before), (rows, columns), patches, grids)


def _check_settings(settings: ImageSettings, vision: VisionConfig) -> None:
    """Refuse a processor of another tower, or one that makes the pictures far larger.

    Raises:
        UnsupportedModelError: naming what differs.
    """
    cut = settings.patch, settings.temporal, settings.merge
    read = vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size
    if cut != read:
        raise UnsupportedModelError(
            f"the image processor cuts patches of {cut}, the vision tower reads {read}"
        )
    if settings.least_pixels > MOST_GROWTH * math.prod(SIZE):
        raise UnsupportedModelError(
            f"the image processor enlarges pictures to {settings.least_pixels} pixels"
        )


def _opened(content: bytes) -> Any:
    """A picture as Pillow's image.

    Raises:
        ResourceError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ResourceError(f"images need Pillow: {error}", hint=install_hint("images")) from None
    return Image.open(io.BytesIO(content)).convert("RGB")


def _check_memory(original: Weights, prompts: PicturePrompts, device: str) -> None:
    """Refuse a tower and windows that do not fit.

    Raises:
        ResourceError: they take more memory than is free.
    """
    shapes = vision_shapes(_vision_of(original)).values()
    tower = torch.float32.itemsize * sum(map(math.prod, shapes))
    config = original.checkpoint.config
    need = max(2 * tower, logits_peak_bytes(config, prompts.windows.shape, device=device))
    check_free("comparing answers about pictures", need, device, "use a machine with more memory")


def _seen(weights: Weights, prompts: PicturePrompts, device: torch.device) -> SeenImages:
    """The pictures as one of the models sees them."""
    tower = load_tower(weights, device)
    made = embed_images(tower, prompts.patches, prompts.grids, device)
    return SeenImages(prompts.start, made, prompts.positions)


def _summarize(figures: TokenFigures, prompts: PicturePrompts) -> ImageQuality:
    """Figures of the tokens of all answers."""
    labels = prompts.labels
    kl_mean = float(figures.kl.mean())
    original, packed = (
        sum(bool(right.all()) for right in prompts.by_answer(top == labels))
        for top in (figures.top_original, figures.top_packed)
    )
    return ImageQuality(
        sha256=pictures_sha256(),
        pictures=len(prompts.answers),
        tokens=len(figures.kl),
        perplexity_original=float(figures.nll_original.mean().exp()),
        perplexity_packed=float(figures.nll_packed.mean().exp()),
        kl_mean=kl_mean,
        kl_error=_error(prompts.by_answer(figures.kl), kl_mean),
        kl_p99=percentile(figures.kl, 0.99),
        top1_agreement=float(figures.agree.double().mean()),
        read_original=original,
        read_packed=packed,
    )


def _error(answers: Sequence[Tensor], mean: float) -> float | None:
    """Standard error of the mean KL of all tokens, of which answers have different numbers."""
    off = torch.stack([kl.sum() - mean * len(kl) for kl in answers])
    return mean_error(mean + off * len(answers) / sum(map(len, answers)))
