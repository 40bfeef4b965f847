"""An original with a smaller vocabulary: the same weights, fewer rows of embedding and head.

The result is an original like any other: to be quantized, calibrated, measured, trained and run.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.export.outputs import Output, copied, row_ranges, write_shards
from lowbit.convert.original.device import open_device
from lowbit.convert.original.progress import Meter, Progress, silent
from lowbit.convert.pipeline.folder import (
    check_apart,
    check_small_files,
    copy_file,
    free_place,
    new_folder,
)
from lowbit.convert.plan.plan import DEFAULT_SHARD_BYTES
from lowbit.convert.texts.evaluation import Text, vocabulary_texts
from lowbit.convert.texts.token_counts import count_text
from lowbit.convert.vocabulary.bits import check_measurable, text_bits
from lowbit.convert.vocabulary.choice import KeptTokens, choose_tokens
from lowbit.convert.vocabulary.languages import common_tokens, tokens_of_languages
from lowbit.convert.vocabulary.token_ids import named_ids, renumbered
from lowbit.convert.vocabulary.tokenizer import ByteLevelBpe, cut_tokenizer, open_tokenizer
from lowbit.formats.architectures import is_carried, is_drafter, is_tied, read_config, tensor_table
from lowbit.formats.architectures.decoder import TEXT, VOCABULARY
from lowbit.formats.errors import CheckpointError, UnsupportedModelError
from lowbit.formats.files.atomic import disk_errors
from lowbit.formats.hub.locate import Location, locate
from lowbit.formats.kept_vocabulary import KEPT_FILE, KeptVocabulary, TextLength
from lowbit.formats.layout.manifest import json_bytes
from lowbit.formats.layout.quantization_config import KEY
from lowbit.formats.safetensors.checkpoint import (
    CONFIG_FILE,
    Checkpoint,
    TensorInfo,
    open_checkpoint,
    read_json,
)
from lowbit.formats.safetensors.hashing import hash_file
from lowbit.formats.safetensors.header import read_header
from lowbit.formats.safetensors.shards import METADATA
from lowbit.formats.text.settings import (
    ADDED_TOKENS_FILE,
    MAX_SETTINGS_BYTES,
    SETTINGS_FILE,
    read_object,
)
from lowbit.formats.text.tokenizer import TOKENIZER_FILE, TextTokenizer, load_text_tokenizer

# Files that may name tokens by id.
NAMING = (
    *("generation_config.json", "processor_config.json", "preprocessor_config.json"),
    *("video_preprocessor_config.json", SETTINGS_FILE),
)
# Other forms of the whole vocabulary, which nobody needs beside tokenizer.json.
OLDER = ("vocab.json", "merges.txt", "tokenizer.model")
OTHER_WORK = "remove it, or choose another output folder"


@dataclass(frozen=True, slots=True)
class CutModel:
    """An original with a smaller vocabulary, in its place."""

    folder: Path  # of it
    source: Location  # where the weights came from
    record: KeptVocabulary  # content of kept_vocabulary.json
    source_bytes: int  # of the source's tensors
    weight_bytes: int  # of the weight files
    left_out: tuple[str, ...]  # files of the source that held the whole vocabulary in another form

    def to_json(self) -> dict[str, Any]:
        """The object of `cut-vocabulary --json`, without the kept tokens' ids."""
        return {
            "folder": str(self.folder),
            "source_bytes": self.source_bytes,
            "weight_bytes": self.weight_bytes,
            "left_out": list(self.left_out),
            "vocabulary": self.record.summary(),
        }


@dataclass(frozen=True, slots=True)
class CutRequest:
    """A smaller vocabulary: tokens to keep, and what to measure."""

    # Number of tokens, rounded up to a multiple of 128; or a file that lists tokens, see
    # `listed_tokens`, beside which the same tokens are kept as ever.
    keep: int | Path
    text: Path | None = None  # .txt or .jsonl, to count tokens on; the bundled one where left out
    languages: Sequence[str] = ()  # codes, such as `de`, of those whose most used words come next
    texts: Sequence[Text] | None = None  # whose tokens are counted before and after; the bundled
    # `cpu` or `cuda`, where both models run to tell the bits that they need for a byte of the
    # texts; None to leave that out.
    measure_on: str | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES  # limit of a weight file


@disk_errors()
def cut_vocabulary(
    source: str | Path,
    out: str | Path,
    request: CutRequest,
    *,
    revision: str | None = None,
    progress: Progress = silent,
) -> CutModel:
    """Write an original whose vocabulary has fewer tokens; memory holds a block of rows.

    Kept are the bytes, added tokens and those that the model's files name, then the tokens that a
    text uses most, then those of languages asked for, then single characters, then those that
    languages and code need most (see `common_tokens`); and what their merges need.

    Args:
        source: folder, or Hub id, of a model that is not quantized.
        progress: called with (phase, done, in all).

    Raises:
        LowbitError: a model or a tokenizer that cannot be cut, a text that cannot be read, or an
            `out` that is not free; all found before anything is written.
    """
    out = Path(out)
    output_dir = free_place(out)
    device = None if request.measure_on is None else open_device(request.measure_on)
    compared = vocabulary_texts() if request.texts is None else request.texts
    location = locate(str(source), revision)
    check_apart(location.folder, output_dir)
    if device is not None:
        check_measurable(location.folder, compared)
    work = plan_cut(location, request.keep, request.text, request.languages)
    with new_folder(output_dir, "cut vocabulary", [*work.names, KEPT_FILE], OTHER_WORK) as partial:
        left_out = write_small_files(work, partial)
        size = _write_weights(work, partial, request.max_shard_bytes, progress)
        lengths = _lengths(work.tokenizer, partial, compared)
        if device is not None:
            lengths = _measured(lengths, compared, (location.folder, partial), device, progress)
        record = _record(work, lengths)
        (partial / KEPT_FILE).write_bytes(record.to_bytes())
    return CutModel(
        folder=out,
        source=location,
        record=record,
        source_bytes=sum(info.nbytes for info in work.checkpoint.tensors.values()),
        weight_bytes=size,
        left_out=left_out,
    )


@dataclass(frozen=True, slots=True)
class PlannedCut:
    """A cut in which everything is decided."""

    location: Location  # where the original is
    checkpoint: Checkpoint  # its headers
    rows: int  # of its embedding
    cut: frozenset[str]  # names of the tensors that lose rows
    names: list[str]  # of its small files
    tokenizer: TextTokenizer  # of the original
    source_tokens: int  # that the tokenizer has
    kept: KeptTokens  # tokens that are kept
    content: Mapping[str, Any]  # of the new tokenizer.json


def plan_cut(
    location: Location, keep: int | Path, text: Path | None, languages: Sequence[str] = ()
) -> PlannedCut:
    """Read the original and choose the tokens, before anything is written."""
    folder = location.folder
    checkpoint = _open_source(folder)
    rows = checkpoint.sizes.vocab_size
    cut = _cut_names(checkpoint, rows)
    names = check_small_files(folder)
    tokenizer = load_text_tokenizer(folder, "a smaller vocabulary")
    bpe = open_tokenizer(tokenizer)
    tokenizer.check_ids(sorted(bpe.ids), rows)
    named = _named(folder, names, checkpoint.config, bpe)
    common = common_tokens(bpe, tokenizer)
    asked = tokens_of_languages(languages, tokenizer)
    kept = choose_tokens(bpe, count_text(tokenizer, rows, text), keep, named, common, asked)
    return PlannedCut(
        location=location,
        checkpoint=checkpoint,
        rows=rows,
        cut=cut,
        names=names,
        tokenizer=tokenizer,
        source_tokens=len(bpe.ids),
        kept=kept,
        content=cut_tokenizer(bpe, kept.ids),
    )


def _open_source(folder: Path) -> Checkpoint:
    """Headers of a model that can be cut, as its files hold them."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    if is_drafter(config):
        raise UnsupportedModelError(f"`{folder}` is a drafter: its vocabulary is another model's")
    if config.get(KEY) is not None or (folder / KEPT_FILE).exists():
        how = "quantized" if config.get(KEY) is not None else "cut already"
        raise UnsupportedModelError(f"`{folder}` is {how}", hint="cut the original, then quantize")
    tensor_table(config, checkpoint.tensors)  # refuses what is not implemented
    return open_as_stored(folder)


def open_as_stored(folder: Path) -> Checkpoint:
    """A model with the tensors that its files hold: fused experts stay fused."""
    checkpoint = open_checkpoint(folder)
    files = sorted({info.file for info in checkpoint.tensors.values()})
    tensors = {n: info for file in files for n, info in read_header(folder / file).items()}
    return Checkpoint(folder, checkpoint.config, tensors)


def _cut_names(checkpoint: Checkpoint, rows: int) -> frozenset[str]:
    config, tensors = checkpoint.config, checkpoint.tensors
    table = tensor_table(config, tensors)
    cut_specs = {spec.name: spec for spec in table if spec.role in ("embedding", "head")}
    for name, spec in cut_specs.items():
        if name not in tensors:
            if spec.role == "head" and is_tied(config):
                continue
            raise CheckpointError(f"`{checkpoint.folder}` lacks `{name}`")
        if tensors[name].shape != spec.shape:
            raise CheckpointError(
                f"`{name}` has shape {list(tensors[name].shape)}, expected {list(spec.shape)}"
            )
    known = {spec.name for spec in table}
    for name, info in tensors.items():
        unknown = name not in known and not is_carried(config, name)
        if unknown and info.shape[:1] == (rows,):
            raise CheckpointError(f"`{name}` has a row a token, which is not understood")
    return frozenset(cut_specs.keys() & tensors.keys())


def _named(
    folder: Path, names: list[str], config: Mapping[str, Any], bpe: ByteLevelBpe
) -> set[int]:
    files = {CONFIG_FILE: config} | {
        name: read_json(folder / name, MAX_SETTINGS_BYTES) for name in NAMING if name in names
    }
    ids_named = set()
    for name, content in files.items():
        ids = named_ids(content, f"`{folder / name}`")
        if unknown := ids - bpe.ids:
            raise CheckpointError(
                f"`{folder / name}` names token {min(unknown)}, which `{bpe.path.name}` lacks"
            )
        ids_named |= ids
    return ids_named


def write_small_files(work: PlannedCut, out: Path) -> tuple[str, ...]:
    """Write tokenizer, config and everything else beside the weights; names of what is left out."""
    (out / TOKENIZER_FILE).write_bytes(_json(work.content))
    folder, config = work.location.folder, work.checkpoint.config
    new = {old: number for number, old in enumerate(work.kept.ids)}
    ids = load_text_tokenizer(out).hub.get_vocab()
    (out / CONFIG_FILE).write_bytes(json_bytes(_cut_config(renumbered(config, new), len(new))))
    left_out = []
    for name in work.names:
        if name in OLDER:
            left_out.append(name)
        elif name in NAMING:
            before = read_json(folder / name, MAX_SETTINGS_BYTES)
            after = _relisted(renumbered(before, new), ids)
            if after == before:
                copy_file(folder / name, out / name)
            else:
                (out / name).write_bytes(json_bytes(after))
        elif name == ADDED_TOKENS_FILE:
            listed = read_object(folder / name, MAX_SETTINGS_BYTES) or {}
            (out / name).write_bytes(
                json_bytes({text: ids[text] for text in listed if text in ids})
            )
        elif name not in (TOKENIZER_FILE, KEPT_FILE):
            copy_file(folder / name, out / name)
    return tuple(left_out)


def _relisted(content: dict[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Number the tokens of tokenizer_config.json's `added_tokens_decoder` by their text."""
    listed = content.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return content
    numbered = {str(ids[entry["content"]]): entry for entry in listed.values() if entry["content"]}
    return {**content, "added_tokens_decoder": numbered}


def _cut_config(config: dict[str, Any], rows: int) -> dict[str, Any]:
    """The config with another size of the vocabulary wherever it stands."""
    key, nested = VOCABULARY.key, config.get(TEXT)
    changed = {**config, key: rows} if key in config else config
    if isinstance(nested, dict) and key in nested:
        changed = {**changed, TEXT: {**nested, key: rows}}
    return changed


def cut_tensors(work: PlannedCut) -> list[Output]:
    """All tensors of the original, those that are cut with the kept rows alone."""
    source, ids = work.checkpoint, torch.tensor(work.kept.ids)
    return [
        Output(info.name, info.dtype, (len(ids), *info.shape[1:]), _kept_rows(source, info, ids))
        if info.name in work.cut
        else copied(source, info)
        for info in source.tensors.values()
    ]


def _write_weights(work: PlannedCut, out: Path, max_shard_bytes: int, on_progress: Progress) -> int:
    outputs = cut_tensors(work)
    total = sum(math.prod(one.shape) * one.dtype.itemsize for one in outputs)
    meter = Meter(on_progress, "export", total)
    return write_shards(outputs, out, max_shard_bytes, METADATA, meter.add)


def _kept_rows(source: Checkpoint, info: TensorInfo, ids: Tensor) -> Callable[[], Iterator[Tensor]]:
    def blocks() -> Iterator[Tensor]:
        for start, stop in row_ranges(info):
            here = ids[(ids >= start) & (ids < stop)]
            if len(here):
                yield source.read_rows(info.name, start, stop)[here - start]

    return blocks


def _lengths(before: TextTokenizer, out: Path, texts: Sequence[Text]) -> tuple[TextLength, ...]:
    contents = [text.content for text in texts]
    after = load_text_tokenizer(out)
    pairs = zip(before.encode_all(contents), after.encode_all(contents), strict=True)
    return tuple(
        TextLength(text.title, len(text.content.encode()), len(old), len(new), None, None)
        for text, (old, new) in zip(texts, pairs, strict=True)
    )


def _measured(
    lengths: Sequence[TextLength],
    texts: Sequence[Text],
    folders: tuple[Path, Path],
    device: torch.device,
    on_progress: Progress,
) -> tuple[TextLength, ...]:
    """The same with bits a byte, of the original and of the cut model."""
    total = 2 * (read_config(read_json(folders[0] / CONFIG_FILE)).num_hidden_layers + 1)
    meter = Meter(on_progress, "compare", total)
    old, new = (text_bits(folder, texts, device, meter.add) for folder in folders)
    return tuple(
        replace(row, bits_before=a, bits_after=b)
        for row, a, b in zip(lengths, old, new, strict=True)
    )


def _record(work: PlannedCut, lengths: tuple[TextLength, ...]) -> KeptVocabulary:
    kept = work.kept
    return KeptVocabulary(
        lowbit_version=version("lowbit"),
        repo=work.location.repo,
        commit=work.location.commit,
        tokenizer_sha256=hash_file(work.tokenizer.path),
        source_rows=work.rows,
        source_tokens=work.source_tokens,
        rows=len(kept.ids),
        text=kept.text,
        text_sha256=kept.text_sha256,
        text_tokens=kept.tokens,
        coverage=kept.coverage,
        held_out=kept.held_out,
        lengths=lengths,
        ids=kept.ids,
    )


def _json(content: Mapping[str, Any]) -> bytes:
    """A tokenizer.json as the tokenizers library writes it: one line, text as UTF-8."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
