"""Convert a random checkpoint in a real model's shapes that needs no room of its own on the disk.

    python examples/benchmarks/convert_streamed.py 3.5-35B-A3B 35b-int4
    python examples/benchmarks/convert_streamed.py config.json out --layers 4

Every shard of the source is a sparse file with a true header, one for a layer. A shard gets its
numbers just before the converter reaches it and loses them once it is read, so that the disk holds
three layers, an embedding that the head is read from too, and the result. The numbers' own time is
subtracted from the wall time.
"""

import json
import math
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import click
import torch
from make_random_checkpoint import EXPERTS, HYBRID_SIZES, SIZES, config_of
from torch import Tensor

from lowbit.convert import Recipe, Request, convert
from lowbit.formats.architectures import is_tied, read_config, tensor_table
from lowbit.formats.architectures.decoder import text_part
from lowbit.formats.architectures.names import split_layer
from lowbit.formats.layout.recipes import Base
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE, INDEX_FILE
from lowbit.formats.safetensors.shards import lay_out

POOL = 1 << 23  # random numbers, 16 MB; every shard repeats them
AHEAD = 2_000_000_000  # source bytes filled before they are done: more than the blocks in flight

Entry = tuple[str, torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the source, and when it is read."""

    path: Path  # of the file
    header: int  # its length in bytes
    size: int  # of the whole file
    first: int  # source bytes that the converter has read before it reads the first of this shard
    last: int  # source bytes that it has read after the last of this shard


@dataclass(slots=True)
class Source:
    """A checkpoint whose shards have numbers only around the place that is being read."""

    shards: list[Shard]  # files in any order
    pool: Tensor  # numbers to write
    filled: set[Path] = field(default_factory=set)  # shards that have or had numbers
    emptied: set[Path] = field(default_factory=set)  # shards that have lost them again
    seconds: float = 0.0  # time that writing numbers took

    def reach(self, done: int) -> None:
        """Fill and empty shards so that the bytes after the first `done` can be read."""
        begun = time.monotonic()
        for shard in self.shards:
            if shard.path not in self.filled and shard.first <= done + AHEAD:
                fill(shard.path, shard.header, shard.size, self.pool)
                self.filled.add(shard.path)
            if shard.path not in self.emptied and shard.last <= done:
                resize(shard.path, shard.header, shard.size)
                self.emptied.add(shard.path)
        self.seconds += time.monotonic() - begun


def fill(path: Path, header: int, size: int, pool: Tensor) -> None:
    """Write random numbers behind a header."""
    data = pool.view(torch.uint8).numpy().data
    with path.open("r+b") as file:
        file.seek(header)
        while file.tell() < size:
            file.write(data[: size - file.tell()])


def resize(path: Path, header: int, size: int) -> None:
    """Give a file its length without room on the disk for anything but the header."""
    with path.open("r+b") as file:
        file.truncate(header)
        file.truncate(size)


def make_source(config: Mapping[str, Any], folder: Path) -> Source:
    """Write headers, index and config.json of a checkpoint with a shard for every layer."""
    shards = []
    index: dict[str, str] = {}
    for number, (entries, first, last) in enumerate(layers(config)):
        name = f"model-{number:05d}.safetensors"
        (shard,) = lay_out(entries, 1 << 62)
        (folder / name).write_bytes(shard.header)
        resize(folder / name, len(shard.header), shard.size)
        shards.append(Shard(folder / name, len(shard.header), shard.size, first, last))
        index |= dict.fromkeys((entry[0] for entry in entries), name)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(0)
    pool = (torch.randn(POOL, generator=generator) * 0.02).to(torch.bfloat16)
    return Source(shards, pool)


def layers(config: Mapping[str, Any]) -> Iterator[tuple[list[Entry], int, int]]:
    """Tensors of every shard, and the source bytes read before its first and after its last.

    The converter reads tensors in the order of the table; a tied head is read from the embedding,
    which stands in the first shard.
    """
    shards: list[tuple[dict[str, Entry], int]] = []
    ends: list[int] = []
    done, previous = 0, None
    for spec in tensor_table(config):
        start, done = done, done + math.prod(spec.shape) * torch.bfloat16.itemsize
        if spec.role == "head" and is_tied(config):
            ends[0] = done
            continue
        layer = split_layer(spec.name)[:2]
        if layer != previous:
            shards.append(({}, start))
            ends.append(done)
            previous = layer
        name, shape = fused(config, spec.name, spec.shape)
        shards[-1][0][name] = (name, torch.bfloat16, shape)
        ends[-1] = done
    for (entries, first), last in zip(shards, ends, strict=True):
        yield list(entries.values()), first, last


def fused(
    config: Mapping[str, Any], name: str, shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """Name and shape of the tensor that holds an expert's weight; Qwen3.5 fuses the decoder's."""
    experts = read_config(config).experts
    before, found, rest = name.partition(".experts.")
    if not found or experts is None or experts.shared_inner is None or before.startswith("mtp."):
        return name, shape
    if rest.endswith("down_proj.weight"):
        return f"{before}.experts.down_proj", (experts.count, *shape)
    return f"{before}.experts.gate_up_proj", (experts.count, 2 * shape[0], shape[1])


def read(size: str, count: int | None) -> dict[str, Any]:
    """config.json of a size, or of a file, with `count` layers."""
    if size in {*SIZES, *HYBRID_SIZES}:
        config: dict[str, Any] = config_of(size)
        config |= {"mtp_num_hidden_layers": 1} if size in EXPERTS and size in HYBRID_SIZES else {}
    else:
        config = json.loads(Path(size).read_text(encoding="utf-8"))
    if count is not None:
        text = text_part(config)
        text["num_hidden_layers"] = count
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][:count]
    return config


@click.command()
@click.argument("size")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--layers", "count", type=click.IntRange(1), help="Layers, where fewer.")
@click.option("--recipe", type=click.Choice(get_args(Base)), default="int4", show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--keep", is_flag=True, help="Keep the result.")
def main(size: str, out: Path, count: int | None, recipe: Base, device: str, keep: bool) -> None:
    """Convert random weights of SIZE, a name as 3.5-35B-A3B or a config.json, into OUT."""
    with tempfile.TemporaryDirectory(dir=out.absolute().parent) as place:
        source = make_source(read(size, count), Path(place))
        source.reach(0)
        reached: dict[str, float] = {}
        begun, unread = time.monotonic(), source.seconds

        def progress(phase: str, done: int, total: int) -> None:
            reached.setdefault(phase, time.monotonic() - begun - (source.seconds - unread))
            if phase == "convert":
                source.reach(done)

        request = Request(Recipe(recipe), device=device)
        done = convert(place, out, request, on_progress=progress).conversion
        seconds = time.monotonic() - begun - (source.seconds - unread)
    tensors = len(done.manifest.tensors)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    read_bytes = sum(shard.size - shard.header for shard in source.shards)
    written = sum(file.size_bytes for file in done.manifest.files)
    click.echo(
        f"{read_bytes / 1e9:.1f} GB to {written / 1e9:.1f} GB, {tensors:,} tensors, in "
        f"{seconds:.0f} s: {reached['convert']:.0f} s before the first block, "
        f"{seconds - reached['verify']:.0f} s after the last; {peak / 1e9:.2f} GB at the peak; "
        f"without the {source.seconds:.0f} s that made numbers"
    )
    if not keep:
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
