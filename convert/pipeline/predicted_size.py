"""Size of the folder of a planned conversion, as `formats.folder_size` will count it.

All files but one are known to the byte: the weights with their headers, config.json, the index, the
draft head and frequent rows, and what is passed through. The length of lowbit.json depends on
digits: those of the scales' ranges, of the shares that tokens of such rows are, and of a
calibration's windows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from lowbit.convert.pipeline.folder import copies, generated_files
from lowbit.convert.plan.plan import Plan, draft_scheme, frequent_scheme, source_rows
from lowbit.convert.quantize.session import SAMPLES, CalibrationRequest, record_of
from lowbit.convert.texts.calibration import BUNDLED_NAME
from lowbit.formats.architectures.names import any_expert
from lowbit.formats.draft_head import DRAFT_FILE
from lowbit.formats.folder_size import counted_bytes
from lowbit.formats.frequent_rows import FREQUENT_FILE
from lowbit.formats.hub.locate import Location
from lowbit.formats.layout.manifest import (
    MANIFEST_FILE,
    Calibration,
    CountedRows,
    Manifest,
    OutputFile,
    OutputTensor,
    Source,
)
from lowbit.formats.layout.packing import SCALE
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.printable import printable
from lowbit.formats.safetensors.checkpoint import DTYPE_NAMES

HASH = "0" * 64
USUAL_SCALE = 0.0012345678901  # of about as many digits as most
LONGEST_SCALE = -1.8367099231598242e-40  # no BF16 number has more
USUAL_SHARE = 0.9123456789012345
LONGEST_SHARE = 0.00012345678901234567
MANY = 100_000_000  # tokens of a text
# More than report and card take: 130 kB of a model of 43 linears.
REPORT_BYTES, REPORT_ROW_BYTES = 200_000, 1_500


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The small files of an original, and where it is from."""

    sizes: Mapping[str, int]  # by their names in the result
    repo: str | None  # Hub id; None for a folder
    commit: str | None  # of the Hub id

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return sum(self.sizes.values())


@dataclass(frozen=True, slots=True)
class PlannedTexts:
    """Texts that a conversion will read, whose names lowbit.json holds."""

    calibration: CalibrationRequest
    draft: Path | None  # to count the tokens of a draft head on; the bundled one when None


@dataclass(frozen=True, slots=True)
class PredictedSizes:
    """Sizes of a planned conversion, in bytes."""

    source: int  # of the folder if it held the source's tensors, as a report compares them
    folder: int  # of the folder
    passed: int  # of the files that are passed through


def files_of(location: Location) -> SourceFiles:
    """The small files of an original on this machine."""
    folder = location.folder
    sizes = {copy: (folder / name).stat().st_size for name, copy in copies(folder).items()}
    return SourceFiles(sizes, location.repo, location.commit)


def predicted_bytes(
    plan: Plan,
    files: SourceFiles,
    texts: PlannedTexts,
    device: torch.device,
    *,
    at_most: bool = False,
) -> int:
    """Bytes of the folder that a plan makes.

    Args:
        texts: that it reads.
        at_most: the figure bounds the folder's; else the digits of lowbit.json are the usual ones.
    """
    generated = {name: len(content) for name, content in generated_files(plan).items()}
    sizes = {**files.sizes, **generated, **{shard.file: shard.size for shard in plan.shards}}
    if plan.draft_rows:
        sizes[DRAFT_FILE] = plan.draft_bytes
    if plan.frequent_rows:
        sizes[FREQUENT_FILE] = plan.frequent_bytes
    method = plan.method
    scale, share = (LONGEST_SCALE, LONGEST_SHARE) if at_most else (USUAL_SCALE, USUAL_SHARE)
    manifest = Manifest(
        lowbit_version=version("lowbit"),
        source=Source(files.repo, files.commit, HASH, HASH),
        recipe=plan.recipe.to_json(),
        source_tensors=source_rows(plan, dict.fromkeys(range(len(plan.steps)), HASH)),
        tensors=_tensors(plan, scale),
        files=tuple(OutputFile(name, size, HASH) for name, size in sizes.items()),
        calibration=_calibration(texts.calibration, device) if method.calibrated else None,
        draft_head=_draft_head(plan, texts.draft, share) if plan.draft_rows else None,
        frequent_rows=_frequent_rows(plan, share) if plan.frequent_rows else None,
    )
    return counted_bytes({**sizes, MANIFEST_FILE: len(manifest.to_bytes())})


def predict(
    plan: Plan, files: SourceFiles, texts: PlannedTexts, device: torch.device
) -> PredictedSizes:
    """Sizes of a planned conversion."""
    generated = sum(map(len, generated_files(plan).values()))
    headers = sum(shard.size - sum(info.nbytes for info in shard.tensors) for shard in plan.shards)
    return PredictedSizes(
        source=files.total + generated + headers + plan.source_bytes,
        folder=predicted_bytes(plan, files, texts, device),
        passed=files.total,
    )


def report_room(plan: Plan) -> int:
    """Bytes that a target of size leaves for the report and the card."""
    rows = {any_expert(module) for module, scheme in plan.schemes.items() if scheme is not None}
    return REPORT_BYTES + REPORT_ROW_BYTES * len(rows)


def _tensors(plan: Plan, scale: float) -> tuple[OutputTensor, ...]:
    files = {info.name: info.file for shard in plan.shards for info in shard.tensors}
    return tuple(
        OutputTensor(
            name=name,
            dtype=DTYPE_NAMES[dtype],
            shape=shape,
            file=files[name],
            sha256=HASH,
            scale_min=scale if name.endswith(f".{SCALE}") else None,
            scale_max=scale if name.endswith(f".{SCALE}") else None,
        )
        for step in plan.steps
        for name, dtype, shape in step.outputs
    )


def _calibration(request: CalibrationRequest, device: torch.device) -> Calibration:
    """A record with the longest numbers that the request allows."""
    text = BUNDLED_NAME if request.file is None else printable(request.file.name)
    samples = request.samples or SAMPLES[device.type]
    return record_of(text, HASH, samples, request.length, request.chat, device)


def _draft_head(plan: Plan, text: Path | None, share: float) -> CountedRows:
    name = BUNDLED_NAME if text is None else printable(text.name)
    return _counted(plan.draft_rows, draft_scheme(plan.config, plan.recipe), name, share)


def _frequent_rows(plan: Plan, share: float) -> CountedRows:
    scheme = frequent_scheme(plan.config, plan.recipe)
    return _counted(plan.frequent_rows, scheme, BUNDLED_NAME, share)


def _counted(rows: int, scheme: Scheme, text: str, share: float) -> CountedRows:
    return CountedRows(
        rows=rows,
        group_size=scheme.group_size,
        text=text,
        text_sha256=HASH,
        tokens=MANY,
        coverage=share,
        held_out=share,
    )
