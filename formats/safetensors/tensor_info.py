"""Header of one stored tensor: its dtype, shape and place."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Dtype, shape and position of one stored tensor."""

    name: str  # as in the header
    dtype: torch.dtype  # torch dtype of the stored values
    shape: tuple[int, ...]  # size of every dimension
    file: str  # name of the shard inside the folder
    offset: int  # position of the first byte in the file
    nbytes: int  # length of the data

    @property
    def dtype_name(self) -> str:
        """The safetensors name of the dtype, `BF16` for instance."""
        return DTYPE_NAMES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which is everything below the first dimension."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


def raw_bytes(tensor: Tensor) -> memoryview:
    """Bytes of a tensor on the CPU as a file stores them."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
