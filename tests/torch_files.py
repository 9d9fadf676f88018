"""Torch's zip format written without torch, opcode by opcode, so that tests can break any part of it."""

import struct
import zipfile
from pathlib import Path

import numpy as np

STORAGES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
}  # fmt: skip
ORDERED_DICT = b"ccollections\nOrderedDict\n)R"
ALIGNMENT = 64  # of the storages, as torch pads them


def write_torch(file: Path, named: dict[str, np.ndarray], shared: bool = True, **members: bytes) -> None:
    """A state dict. `shared`: views of one array share a storage. `members`: other content, `data_0` for data/0."""
    storages: dict[int, tuple[str, np.ndarray]] = {}
    entries = []
    for name, value in named.items():
        value = np.asarray(value)
        base = value.base if shared and isinstance(value.base, np.ndarray) else value
        base = base if base.flags.c_contiguous and base.dtype == value.dtype else np.ascontiguousarray(value)
        key, base = storages.setdefault(id(base), (str(len(storages)), base))
        view = value if base is value or base is value.base else base
        offset = (view.ctypes.data - base.ctypes.data) // base.itemsize
        strides = tuple(step // base.itemsize for step in view.strides)
        entries.append(text(name) + tensor(base.dtype.name, key, base.size, offset, view.shape, strides))
    pickle = b"\x80\x02" + ORDERED_DICT + b"(" + b"".join(entries) + b"u."
    contents = {"data.pkl": pickle, "byteorder": b"little"}
    contents |= {f"data/{key}": base.tobytes() for key, base in storages.values()}
    write_zip(file, contents | {"version": b"3\n"} | {name.replace("_", "/"): value for name, value in members.items()})


def write_zip(file: Path, contents: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """An archive whose members begin at multiples of ALIGNMENT."""
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in contents.items():
            info = zipfile.ZipInfo(f"pytorch_model/{name}")
            info.compress_type = compression
            gap = -(archive.fp.tell() + 30 + len(info.filename) + 4) % ALIGNMENT
            info.extra = b"FB" + struct.pack("<H", gap) + b"Z" * gap
            archive.writestr(info, content)


def tensor(dtype: str, key: str, size: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """Opcodes of torch._utils._rebuild_tensor_v2(storage, offset, shape, strides, False, OrderedDict())."""
    storage = b"(" + text("storage") + f"ctorch\n{STORAGES[dtype]}\n".encode() + text(key) + text("cpu")
    storage += number(size) + b"tQ"
    arguments = b"(" + storage + number(offset) + numbers(shape) + numbers(strides) + b"\x89" + ORDERED_DICT + b"t"
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"
