"""An inspection as a tree in the terminal, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.text import Text

from lowbit.convert.cli.tables.lines import aside, warn
from lowbit.convert.measure.inspection import Entry, Inspection, Node, tree
from lowbit.convert.report.formatting import size
from lowbit.formats.shell.tables import plain_table, results, styled

PREFIXES = ("model", "model.language_model", "language_model.model")
MANY = 3  # runs of layers that are named
MOST_DAMAGE = 5  # sentences on damaged scales


def inspection(found: Inspection) -> None:
    """Show modules as a tree, with what they are stored as and what they weigh."""
    console = results()
    at = f" at {found.commit[:12]}" if found.commit else ""
    table = plain_table(
        f"{found.source}{at}", ("module", "shape", "stored as", "scales"), ("size",)
    )
    for row in _rows(_without_prefix(tree(found.entries)), "", 1):
        table.add_row(*row)
    console.print(table)
    console.print(
        f"{size(found.size_bytes)}, {found.bits_per_weight:.2f} bits per weight, "
        f"{found.tensors} tensors of {size(found.nbytes)}, {found.model_type}"
    )
    for sentence in found.damage[:MOST_DAMAGE]:
        warn(f"damaged: {sentence}")
    if (more := len(found.damage) - MOST_DAMAGE) > 0:
        warn(f"damaged: {more} more")
    manifest = found.manifest
    if manifest is None:
        aside("no lowbit.json: an export, or written by another tool")
        return
    if not found.scales_read:
        aside("ranges of scales as lowbit.json states them; those of a folder are read")
    source = manifest.source
    origin = f"{source.repo} at {source.commit}" if source.repo else "a local folder"
    given = (
        f"{key} {value}" for key, value in manifest.recipe.items() if value not in (None, [], False)
    )
    aside(
        f"lowbit {manifest.lowbit_version}, from {origin}, weights {source.weights_sha256[:12]}; "
        f"{', '.join(given)}"
    )


def _without_prefix(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The decoder's modules without the name that all of them begin with."""
    return tuple(
        inner
        for node in nodes
        for inner in (node.children if node.name in PREFIXES and not node.entry else (node,))
    )


def _rows(nodes: tuple[Node, ...], indent: str, above: int) -> Iterator[tuple[str | Text, ...]]:
    """The cells of every node and what is below it; a count is shown where it changes."""
    for number, node in enumerate(nodes):
        last = number == len(nodes) - 1
        count = f" ({node.count})" if node.count != above else ""
        branch = indent + ("└ " if last else "├ ")
        name = styled((branch, "dim"), _short(node.name), (count, "dim"))
        entry = node.entry
        if entry is None:
            yield name, "", "", "", styled((size(node.nbytes), "dim"))
        else:
            stored = styled((entry.stored, "cyan" if entry.bits else ""))
            shape = "x".join(map(str, entry.shape))
            yield name, shape, stored, _scales(entry), size(node.nbytes)
        yield from _rows(node.children, f"{indent}{'  ' if last else '│ '}", node.count)


def _short(name: str) -> str:
    """The numbers of many runs of layers, abridged."""
    parts = name.split(", ")
    return name if len(parts) <= MANY else f"{parts[0]}, {parts[1]}, …, {parts[-1]}"


def _scales(entry: Entry) -> str | Text:
    """The range of the finite scales, and how many are not."""
    parts = []
    if entry.scale_min is not None and entry.scale_max is not None:
        parts.append(f"{entry.scale_min:.2g}…{entry.scale_max:.2g}")
    counts = ((entry.nan_scales, "NaN"), (entry.infinite_scales, "infinite"))
    lost = [f"{count:,} {kind}" for count, kind in counts if count]
    return styled((", ".join(parts + lost), "bold red")) if lost else "".join(parts)


def inspection_json(found: Inspection) -> dict[str, Any]:
    """The object of `inspect --json`: one row a module, none left out."""
    manifest = found.manifest
    return {
        "source": found.source,
        "commit": found.commit,
        "model_type": found.model_type,
        "tensors": found.tensors,
        "bytes": found.nbytes,
        "folder_bytes": found.size_bytes,
        "scales_read": found.scales_read,
        "damage": list(found.damage),
        "bits_per_weight": found.bits_per_weight,
        "modules": [_row(entry) for entry in found.entries],
        "lowbit_version": manifest.lowbit_version if manifest else None,
        "recipe": manifest.recipe if manifest else None,
        "original": asdict(manifest.source) if manifest else None,
    }


def _row(entry: Entry) -> dict[str, Any]:
    row = asdict(entry)
    row["bytes"] = row.pop("nbytes")
    return row
