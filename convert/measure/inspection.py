"""Contents of a packed checkpoint as a tree of modules.

Headers and scales of a folder are read; of a checkpoint on the Hub headers alone, so that ranges of
scales are those that its lowbit.json states.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowbit.formats.architectures import kind_of, read_config
from lowbit.formats.architectures.names import spans
from lowbit.formats.draft_head import BITS as DRAFT_BITS
from lowbit.formats.draft_head import DRAFT_FILE
from lowbit.formats.errors import FormatError
from lowbit.formats.folder_size import counted_bytes, folder_bytes
from lowbit.formats.frequent_rows import BITS as FREQUENT_BITS
from lowbit.formats.frequent_rows import FREQUENT_FILE
from lowbit.formats.hub.ids import hub_id
from lowbit.formats.hub.locate import RemoteHeaders, remote_headers
from lowbit.formats.layout.manifest import MANIFEST_FILE, Manifest, read_manifest
from lowbit.formats.layout.packing import SCALE
from lowbit.formats.layout.quantization_config import KEY, TRANSLATED
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.machine.cores import core_count
from lowbit.formats.packed import PackedCheckpoint, check_packed, open_packed
from lowbit.formats.safetensors.checkpoint import Checkpoint
from lowbit.formats.weight_bits import weight_bits

VISION = "vision tower"
DRAFT_HEAD = "draft head"
FREQUENT_ROWS = "frequent rows of the head"
WHOLE = (VISION, DRAFT_HEAD, FREQUENT_ROWS)  # names that are no path of modules


@dataclass(frozen=True, slots=True)
class Entry:
    """A linear or another tensor, whatever number of tensors it is stored as."""

    name: str  # of the module; of the tensor where the module has several
    shape: tuple[int, ...]  # of the weight; empty for parts that are carried as a whole
    stored: str  # `INT4 g128`, or a dtype
    bits: int | None  # of its codes; None where it is not packed
    # Weights that share a scale; None for a whole row, or where it is not packed
    group_size: int | None
    scale_min: float | None  # smallest finite scale; None where there is none, or it is not known
    scale_max: float | None  # largest finite one
    nbytes: int  # of all its tensors
    tensors: int  # how many those are
    nan_scales: int = 0  # scales that are NaN; 0 where they are not read
    infinite_scales: int = 0  # scales that are infinite; 0 where they are not read


@dataclass(frozen=True, slots=True)
class Node:
    """A module, or several that are equal but for their number."""

    name: str  # the last part of its name; of several layers with their numbers, `layers 0-2, 4-6`
    count: int  # how many modules it stands for
    # Its own stored tensors; several modules give their sum, and the whole range of scales
    entry: Entry | None
    children: tuple["Node", ...]  # below it, in the order of the file
    nbytes: int  # of all of it


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint to look at."""

    source: str  # folder or Hub id
    commit: str | None  # of a Hub id; None for a folder
    model_type: str  # of its architecture; the class of a drafter
    entries: tuple[Entry, ...]  # everything in it, in the order of the architecture
    manifest: Manifest | None  # its lowbit.json; None where another tool wrote it
    bits_per_weight: float  # of all weight files, over the parameters
    size_bytes: int  # of the folder, reports aside
    scales_read: bool  # the ranges are of the stored scales; else those of lowbit.json
    # Sentences on scales that are not finite, or not those of lowbit.json
    damage: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def tensors(self) -> int:
        """Number of tensors in the files."""
        return sum(entry.tensors for entry in self.entries)


def inspect(source: str) -> Inspection:
    """Look at a folder, or at `org/name[@revision]` by range requests; no code is read.

    Raises:
        LowbitError: a checkpoint that is missing, damaged or of an unknown kind.
    """
    on_hub = None if Path(source).exists() else hub_id(source)
    if on_hub is None:
        folder = Path(source)
        packed = open_packed(folder)
        return _inspection(packed, source, None, folder_bytes(folder), _read_scales(packed))
    repo, revision = on_hub
    remote = remote_headers(repo, revision, also=(MANIFEST_FILE,))
    method = _method(remote.config)
    if method in TRANSLATED:  # to describe them
        raise FormatError(
            f"`{repo}` is packed by {method.upper()}, whose tensors have to be read",
            hint="download it, then inspect the folder",
        )
    checkpoint = Checkpoint(Path(repo), remote.config, remote.tensors)
    packed = check_packed(checkpoint, read_manifest(remote.folder))
    return _inspection(packed, repo, remote.commit, _remote_bytes(packed, remote), None)


def _method(config: Mapping[str, Any]) -> str:
    section = config.get(KEY)
    return str(section.get("quant_method")) if isinstance(section, dict) else ""


def _remote_bytes(packed: PackedCheckpoint, remote: RemoteHeaders) -> int:
    sizes = dict(remote.other_files)
    if packed.manifest is not None:
        sizes |= {file.name: file.size_bytes for file in packed.manifest.files}
    for info in packed.checkpoint.tensors.values():  # the last tensor ends its file
        sizes[info.file] = max(sizes.get(info.file, 0), info.offset + info.nbytes)
    return counted_bytes(sizes)


@dataclass(frozen=True, slots=True)
class _Scales:
    """Scales of a linear: the range of the finite ones, and how many are not."""

    low: float | None
    high: float | None
    nan: int = 0
    infinite: int = 0


def _read_scales(packed: PackedCheckpoint) -> dict[str, _Scales]:
    names = [f"{module}.{SCALE}" for module, scheme in packed.schemes.items() if scheme is not None]

    def read(name: str) -> _Scales:
        scale = packed.checkpoint.read(name)
        finite = scale[scale.isfinite()]
        nan, infinite = int(scale.isnan().sum()), int(scale.isinf().sum())
        if not len(finite):
            return _Scales(None, None, nan, infinite)
        return _Scales(float(finite.min()), float(finite.max()), nan, infinite)

    with ThreadPoolExecutor(core_count()) as pool:
        return dict(zip(names, pool.map(read, names), strict=True))


def _damage(stored: Mapping[str, _Scales], manifest: Manifest | None) -> list[str]:
    """Sentences on scales that are not finite, or of another range than lowbit.json says."""
    listed = {} if manifest is None else {tensor.name: tensor for tensor in manifest.tensors}
    damage = []
    for name, scales in stored.items():
        counts = ((scales.nan, "NaN"), (scales.infinite, "infinite"))
        parts = [f"{count:,} {kind}" for count, kind in counts if count]
        row = listed.get(name)
        if parts:
            damage.append(f"`{name}` holds {' and '.join(parts)} scales")
        elif row is not None and (row.scale_min, row.scale_max) != (scales.low, scales.high):
            damage.append(
                f"`{name}` holds {scales.low} to {scales.high}, {MANIFEST_FILE} says "
                f"{row.scale_min} to {row.scale_max}"
            )
    return damage


def _inspection(
    packed: PackedCheckpoint,
    source: str,
    commit: str | None,
    size_bytes: int,
    stored: Mapping[str, _Scales] | None,
) -> Inspection:
    """An inspection; `stored` are the scales as they were read, None where they were not."""
    config = packed.checkpoint.config
    listed = () if packed.manifest is None else packed.manifest.tensors
    stated = {row.name: _Scales(row.scale_min, row.scale_max) for row in listed}
    known = stated if stored is None else stored
    entries = []
    for spec in packed.specs:
        scheme = packed.schemes.get(spec.module)
        tensors = packed.tensors_of(spec)
        scales = known.get(f"{spec.module}.{SCALE}", _Scales(None, None))
        entries.append(
            Entry(
                name=spec.module,
                shape=spec.shape,
                stored=str(scheme or tensors[0].dtype_name),
                bits=None if scheme is None else scheme.bits,
                group_size=None if scheme is None else scheme.group_size,
                scale_min=scales.low,
                scale_max=scales.high,
                nbytes=sum(info.nbytes for info in tensors),
                tensors=len(tensors),
                nan_scales=scales.nan,
                infinite_scales=scales.infinite,
            )
        )
    if packed.carried:
        size, count = packed.carried_bytes, len(packed.carried)
        dtypes = packed.carried_dtypes
        entries.append(Entry(VISION, (), dtypes, None, None, None, None, size, count))
    if packed.manifest is not None:
        entries += _head_rows(packed.manifest, read_config(config).hidden_size)
    bits = weight_bits(packed.checkpoint, packed.manifest)
    return Inspection(
        source=source,
        commit=commit,
        model_type=kind_of(config),
        entries=tuple(entries),
        manifest=packed.manifest,
        bits_per_weight=bits,
        size_bytes=size_bytes,
        scales_read=stored is not None,
        damage=tuple(_damage(stored or {}, packed.manifest)),
    )


def _head_rows(manifest: Manifest, hidden: int) -> Iterator[Entry]:
    """Rows of the head that lie in files of their own."""
    for name, file_name, bits, made in (
        (DRAFT_HEAD, DRAFT_FILE, DRAFT_BITS, manifest.draft_head),
        (FREQUENT_ROWS, FREQUENT_FILE, FREQUENT_BITS, manifest.frequent_rows),
    ):
        if made is None:
            continue
        size = sum(file.size_bytes for file in manifest.files if file.name == file_name)
        shape, group = (made.rows, hidden), made.group_size
        yield Entry(name, shape, str(Scheme(bits, group)), bits, group, None, None, size, 3)


def tree(entries: Sequence[Entry]) -> tuple[Node, ...]:
    """The entries as a tree; layers that are equal but for their number are one node."""
    paths = ([entry.name] if entry.name in WHOLE else entry.name.split(".") for entry in entries)
    return _nodes(zip(paths, entries, strict=True))


def _nodes(rows: Iterable[tuple[list[str], Entry]]) -> tuple[Node, ...]:
    """Nodes of entries, each with the path to it; those right at the root are left out."""
    below: dict[str, list[tuple[list[str], Entry]]] = {}
    for path, entry in rows:
        if path:
            below.setdefault(path[0], []).append((path[1:], entry))
    nodes = [node for name, rows in below.items() for node in _unfold(_node(name, rows))]
    groups: dict[object, list[Node]] = {}
    for node in nodes:
        key = _likeness(node, top=True) if node.name.isdecimal() else node.name
        groups.setdefault(key, []).append(node)
    return tuple(_merge(group, _numbers(group)) for group in groups.values())


def _unfold(node: Node) -> list[Node]:
    """The groups of layers in place of the list that holds them; any other node as it is."""
    if node.entry is None and all(child.name[0].isdecimal() for child in node.children):
        return [replace(child, name=f"{node.name} {child.name}") for child in node.children]
    return [node]


def _node(name: str, rows: list[tuple[list[str], Entry]]) -> Node:
    entry = next((entry for rest, entry in rows if not rest), None)
    children = _nodes(rows)
    numbered = name.isdecimal() or any(child.name[0].isdecimal() for child in children)
    if entry is None and len(children) == 1 and not numbered:
        return replace(children[0], name=f"{name}.{children[0].name}")
    size = sum(child.nbytes for child in children) + (entry.nbytes if entry else 0)
    return Node(name, 1, entry, children, size)


def _likeness(node: Node, top: bool = False) -> object:
    """Equal for nodes that differ in number, bytes' place and scales alone."""
    entry = node.entry
    own = None if entry is None else (entry.shape, entry.stored)
    return ("" if top else node.name, own, tuple(_likeness(child) for child in node.children))


def _merge(nodes: list[Node], name: str) -> Node:
    if len(nodes) == 1:
        return replace(nodes[0], name=name)
    return Node(
        name=name,
        count=sum(node.count for node in nodes),
        entry=_sum([node.entry for node in nodes if node.entry is not None]),
        children=tuple(
            _merge(list(same), same[0].name)
            for same in zip(*(node.children for node in nodes), strict=True)
        ),
        nbytes=sum(node.nbytes for node in nodes),
    )


def _sum(entries: list[Entry]) -> Entry | None:
    if not entries:
        return None
    lows = [entry.scale_min for entry in entries if entry.scale_min is not None]
    highs = [entry.scale_max for entry in entries if entry.scale_max is not None]
    return replace(
        entries[0],
        scale_min=min(lows, default=None),
        scale_max=max(highs, default=None),
        nbytes=sum(entry.nbytes for entry in entries),
        tensors=sum(entry.tensors for entry in entries),
        nan_scales=sum(entry.nan_scales for entry in entries),
        infinite_scales=sum(entry.infinite_scales for entry in entries),
    )


def _numbers(nodes: list[Node]) -> str:
    """`0-2, 4-6` for layers; the name of anything else."""
    if not nodes[0].name.isdecimal():
        return nodes[0].name
    return spans(sorted(int(node.name) for node in nodes))
