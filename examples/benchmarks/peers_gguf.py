"""llama.cpp quantizes one BF16 checkpoint; bench_real_models.py runs this for every type.

    pip install llama-cpp-python
    python examples/benchmarks/peers_gguf.py llama.cpp:Q4_K_M FOLDER OUT calibration.txt 128 512

OUT holds one GGUF file afterwards. The importance matrix is that of llama-imatrix: for every matrix
of the layers the squares of its inputs, column by column, over the calibration windows, here by
transformers in FP32. It lies beside OUT in the format of llama-imatrix, NAME.imatrix.gguf, with the
checkpoint in BF16, NAME.bf16; both serve the types that follow.

Where LLAMA_CPP_LIB_PATH names a folder with libllama, llama-cpp-python takes that one.
"""

import ctypes
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import torch
from peers_quantize import cut
from real_models import gguf_names
from torch import Tensor

SUMS, COUNTS = ".in_sum2", ".counts"


@click.command()
@click.argument("peer", metavar="llama.cpp:TYPE")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("calib", type=click.Path(exists=True, path_type=Path))
@click.argument("samples", type=int)
@click.argument("length", type=int)
@click.argument("group", type=int, default=0)
def main(
    peer: str, source: Path, out: Path, calib: Path, samples: int, length: int, group: int
) -> None:
    """Convert the checkpoint SOURCE into OUT/model.gguf, after SAMPLES windows of CALIB.

    GROUP is what other peers are told; llama.cpp's types have sizes of their own.
    """
    kind = peer.rpartition(":")[2]
    importance_file = out.parent / f"{source.name}.imatrix.gguf"
    if not importance_file.exists():
        windows = cut(source, calib.read_text(encoding="utf-8"), length, samples)
        write_importance(importance_file, *measure_importance(source, windows), calib.name, length)
    whole = export_bf16(source, out.parent / f"{source.name}.bf16")
    out.mkdir()
    quantize(whole, out / "model.gguf", kind, read_importance(importance_file))


def export_bf16(source: Path, folder: Path) -> Path:
    """The checkpoint as one GGUF file with every weight as it is; made where it is missing."""
    from lowbit.convert.export.export import export

    if not folder.exists():
        export(source, folder, "gguf")
    return folder / f"{folder.name}.gguf"


@torch.inference_mode()
def measure_importance(source: Path, windows: Tensor) -> tuple[dict[str, Tensor], int]:
    """Sums of the squared inputs of the layers' matrices, and the tokens that they are of.

    Args:
        windows: [windows, T] int64.

    Returns:
        Sums [K] float64 by the name of the matrix in GGUF; llama-imatrix leaves out the head, too.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    names, sums = gguf_names(model.config), {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in path:
            name = names(f"{path}.weight")
            sums[name] = torch.zeros(module.in_features, dtype=torch.float64)
            module.register_forward_pre_hook(add_squares(sums[name]))
    for batch in torch.split(windows, 4):
        model.base_model(batch, use_cache=False)
    return sums, windows.numel()


def add_squares(total: Tensor) -> Any:
    """A hook that adds the squares of a linear's inputs [..., K] to `total` [K]."""

    def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        total.add_(inputs[0].flatten(0, -2).square().sum(0, dtype=torch.float64))

    return hook


def write_importance(
    path: Path, sums: Mapping[str, Tensor], tokens: int, text: str, length: int
) -> None:
    """Write sums of squares as llama-imatrix does: sums and counts of every matrix."""
    import numpy as np
    from gguf import GGUFWriter

    with closing(GGUFWriter(path, "")) as writer:
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", [text])
        writer.add_uint32("imatrix.chunk_count", tokens // length)
        writer.add_uint32("imatrix.chunk_size", length)
        for name in sorted(sums):
            writer.add_tensor(f"{name}{SUMS}", sums[name].float().numpy()[None])
            writer.add_tensor(f"{name}{COUNTS}", np.full((1, 1), tokens, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def read_importance(path: Path) -> dict[str, Tensor]:
    """Mean squared inputs [K] float32 of every matrix in such a file."""
    from gguf import GGUFReader

    tensors = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    found = {}
    for name, sums in tensors.items():
        if name.endswith(SUMS):
            count = tensors[name.removesuffix(SUMS) + COUNTS]
            found[name.removesuffix(SUMS)] = torch.from_numpy((sums / count).flatten())
    return found


def quantize(whole: Path, out: Path, kind: str, importance: Mapping[str, Tensor]) -> None:
    """Have llama.cpp write a file in one of its types.

    Args:
        kind: `Q4_K_M`; with it llama.cpp chooses a type for every tensor.
    """
    import llama_cpp

    ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}", None)
    if ftype is None:
        sys.exit(f"llama.cpp has no type {kind}")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = ftype
    settings.nthread = torch.get_num_threads()
    records = importance_records(importance, llama_cpp.llama_model_imatrix_data)
    settings.imatrix = ctypes.cast(records, type(settings.imatrix))
    if failed := llama_cpp.llama_model_quantize(bytes(whole), bytes(out), ctypes.byref(settings)):
        sys.exit(f"llama_model_quantize ended with {failed}")


def importance_records(importance: Mapping[str, Tensor], record: type[ctypes.Structure]) -> Any:
    """An array of llama_model_imatrix_data, closed by one without a name.

    The array keeps the memory that it points to.
    """
    made: Any = (record * (len(importance) + 1))()
    made.kept = []
    pointer: Any = {field[0]: field[1] for field in record._fields_}["data"]
    for place, (name, values) in zip(made, importance.items(), strict=False):
        values = values.to(torch.float32).contiguous()
        made.kept.append(values)
        place.name = name.encode()
        place.data = ctypes.cast(values.data_ptr(), pointer)
        place.size = values.numel()
    return made


if __name__ == "__main__":
    main()
