"""The header of a safetensors file: which tensors it holds, and where.

Such a file is 8 bytes of header length, a JSON header (name -> dtype, shape, offsets), then the raw tensors.
Source: the format's specification (huggingface/safetensors, README).
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ncp_jax.checkpoint.hf_tensor import HFError, StoredTensor, damaged, parse_json

DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
HEADER_LIMIT = 100_000_000  # bytes; the format's own bound


def read_safetensors(file: Path) -> dict[str, StoredTensor]:
    """Name -> place of every tensor of one file. Raises HFError unless the file is whole and consistent."""
    entries, data = _read_entries(file)
    entries.pop("__metadata__", None)
    tensors = {name: _stored(file, name, entry, data) for name, entry in entries.items()}
    end, size = data, file.stat().st_size
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if tensor.offset != end:
            raise damaged(file, f"tensor {name} begins at byte {tensor.offset}, the one before it ends at {end}")
        end += tensor.bytes
    if end != size:
        raise damaged(file, f"{'truncated: ' if end > size else ''}it has {size} bytes, its header describes {end}")
    return tensors


def _read_entries(file: Path) -> tuple[dict[str, Any], int]:
    """The header as it stands, and where the data begins."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise damaged(file, f"its {size} bytes cannot hold the header of {length} bytes that it announces")
            text = opened.read(length)
    except OSError as error:
        raise HFError(f"cannot read {file}: {error.strerror}") from None
    entries = parse_json(text, file)
    if not isinstance(entries, dict):
        raise damaged(file, "its header is no JSON object")
    return entries, 8 + length


def _stored(file: Path, name: str, entry: Any, data: int) -> StoredTensor:
    try:
        code, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise damaged(file, f"the header entry of {name} is not a dtype, a shape and two offsets")
    if code not in DTYPES:
        raise HFError(f"{file}: tensor {name} has dtype {code}; known are {', '.join(DTYPES)}")
    tensor = StoredTensor(file, DTYPES[code], shape, data + start)
    if tensor.bytes != end - start:
        raise damaged(file, f"tensor {name} is {tensor}, {tensor.bytes} bytes, but its place has {end - start}")
    return tensor
