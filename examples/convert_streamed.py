"""Convert a random checkpoint in a real model's shapes that needs no room of its own on the disk.

    python examples/convert_streamed.py 3.5-35B-A3B 35b-int4
    python examples/convert_streamed.py config.json out --layers 4

Every shard of the source is a sparse file with a true header, one for a layer. A shard gets its
numbers just before the converter reaches it and loses them once it is read, so that the disk holds
three layers and the result. The numbers' own time is subtracted from the wall time.
"""

import json
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import torch
from make_random_checkpoint import EXPERTS, HYBRID_SIZES, SIZES, config_of
from torch import Tensor

from lowbit.convert import Recipe, convert
from lowbit.formats.architectures import is_tied, read_config, tensor_table
from lowbit.formats.architectures.decoder import text_part
from lowbit.formats.architectures.names import split_layer
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE, INDEX_FILE
from lowbit.formats.safetensors.shards import lay_out

POOL = 1 << 23  # random numbers, 16 MB; every shard repeats them
AHEAD = 256_000_000  # source bytes that are there before the converter reaches them

Entry = tuple[str, torch.dtype, tuple[int, ...]]


@dataclass(slots=True)
class Source:
    """A checkpoint whose shards have numbers only around the place that is being read.

    Attributes:
        shards: path, length of the header and length of the file, in the order of reading.
        pool: numbers to write.
        filled: shards that have or had numbers.
        emptied: shards that have lost them again.
        seconds: time that writing numbers took.
    """

    shards: list[tuple[Path, int, int]]
    pool: Tensor
    filled: int = 0
    emptied: int = 0
    seconds: float = 0.0

    def reach(self, done: int) -> None:
        """Fill and empty shards so that the bytes after the first `done` can be read."""
        begun = time.monotonic()
        start = 0
        for number, (path, header, size) in enumerate(self.shards):
            end = start + size - header
            if number >= self.filled and start <= done + AHEAD:
                fill(path, header, size, self.pool)
                self.filled = number + 1
            if number >= self.emptied and end <= done:
                resize(path, header, size)
                self.emptied = number + 1
            start = end
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
    shards, index = [], {}
    for number, entries in enumerate(layers(config)):
        name = f"model-{number:05d}.safetensors"
        (shard,) = lay_out(entries, 1 << 62)
        (folder / name).write_bytes(shard.header)
        resize(folder / name, len(shard.header), shard.size)
        shards.append((folder / name, len(shard.header), shard.size))
        index |= dict.fromkeys((entry[0] for entry in entries), name)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(0)
    pool = (torch.randn(POOL, generator=generator) * 0.02).to(torch.bfloat16)
    return Source(shards, pool)


def layers(config: Mapping[str, Any]) -> Iterator[list[Entry]]:
    """Tensors of every shard, in the order in which the converter reads them."""
    specs = [spec for spec in tensor_table(config) if not (spec.role == "head" and is_tied(config))]
    for _, group in groupby(specs, lambda spec: split_layer(spec.name)[:2]):
        entries: dict[str, Entry] = {}
        for spec in group:
            name, shape = fused(config, spec.name, spec.shape)
            entries[name] = (name, torch.bfloat16, shape)
        yield list(entries.values())


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
@click.option("--recipe", default="int4", show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--keep", is_flag=True, help="Keep the result.")
def main(size: str, out: Path, count: int | None, recipe: str, device: str, keep: bool) -> None:
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

        done = convert(place, out, Recipe(recipe), device=device, progress=progress)
        seconds = time.monotonic() - begun - (source.seconds - unread)
    tensors = len(done.manifest.tensors)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    read_bytes = sum(end - start for _, start, end in source.shards)
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
