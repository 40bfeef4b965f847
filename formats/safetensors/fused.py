"""Fused experts, presented one by one without reading them.

Qwen3.5's files hold all experts of a layer in two tensors, `experts.gate_up_proj` [E, 2 I, h] and
`experts.down_proj` [E, h, I]. The rows of every expert lie together in the file, so that a header
for each is enough: every room reads, hashes, quantizes and names single experts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from lowbit.formats.errors import CheckpointError
from lowbit.formats.safetensors.tensor_info import TensorInfo

FUSED: Mapping[str, tuple[str, ...]] = {
    ".experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".experts.down_proj": ("down_proj",),
}
MAX_EXPERTS = 4096  # of a layer; a header may claim any number of empty ones


def split_experts(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Headers by name, with one for every weight of a fused expert in place of the fused tensor's.

    Raises:
        CheckpointError: a layer holds experts fused and one by one.
    """
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        suffix = next((suffix for suffix in FUSED if name.endswith(suffix)), None)
        if suffix is None or not _splits(info, len(FUSED[suffix])):
            found[name] = info
            continue
        found |= {part.name: part for part in _parts(info, suffix)}
        _check_unmixed(name, suffix, tensors)
    return found


def _splits(info: TensorInfo, kinds: int) -> bool:
    """Tell if a tensor is a stack of matrices that can be cut into `kinds` each."""
    return len(info.shape) == 3 and info.shape[0] <= MAX_EXPERTS and not info.shape[1] % kinds


def _parts(info: TensorInfo, suffix: str) -> Iterator[TensorInfo]:
    experts, rows, columns = info.shape
    kinds = FUSED[suffix]
    shape = (rows // len(kinds), columns)
    nbytes = info.nbytes // max(1, experts * len(kinds))
    prefix, offset = info.name.removesuffix(suffix), info.offset
    for number in range(experts):
        for kind in kinds:
            name = f"{prefix}.experts.{number}.{kind}.weight"
            yield replace(info, name=name, shape=shape, offset=offset, nbytes=nbytes)
            offset += nbytes


def _check_unmixed(name: str, suffix: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse single experts beside fused ones of the same projections."""
    prefix = name.removesuffix(suffix) + ".experts."
    for other in tensors:
        rest = other.removeprefix(prefix).split(".")
        if other.startswith(prefix) and rest[0].isdecimal() and rest[1] in FUSED[suffix]:
            raise CheckpointError(
                f"the checkpoint holds `{name}`, all experts of a layer, and `{other}` beside it",
                hint="experts are stored fused or one by one; keep one of the two",
            )
