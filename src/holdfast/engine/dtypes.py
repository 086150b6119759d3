"""torch dtypes and their names in a checkpoint."""

from __future__ import annotations

import torch

from holdfast.errors import UnsupportedState

NAME_OF: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "C128",
}
DTYPE_OF = {name: dtype for dtype, name in NAME_OF.items()}


def name_of(tensor: torch.Tensor, path: str) -> str:
    """The dtype's name; UnsupportedState for one that no checkpoint file can hold (quantized, sub-byte)."""
    try:
        return NAME_OF[tensor.dtype]
    except KeyError:
        raise UnsupportedState(f"{path} is a tensor of {tensor.dtype}, which a safetensors file cannot hold") from None
