"""Torch's own files (`pytorch_model.bin`) read in place: without torch, and without doing what they say.

Such a file is a zip archive of NAME/data.pkl, a pickle that describes the tensors, and NAME/data/KEY, the bytes of one
storage each, not compressed. A pickle is a program that may call anything. Here its opcodes are checked before it runs,
and a global that it names is one of the few inert words below or an error: no function of Python or of a package is
within its reach. Tensors may share a storage and may lie in it in any order. Source: torch/serialization.py and
torch/_utils.py (torch 1.6 and later), Python's pickletools.
"""

import io
import math
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from ncp_jax.checkpoint.hf_tensor import HFError, StoredTensor, damaged

DTYPES = {
    "DoubleStorage": np.dtype(np.float64), "FloatStorage": np.dtype(np.float32), "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16), "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32), "ShortStorage": np.dtype(np.int16), "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8), "BoolStorage": np.dtype(np.bool_),
}  # fmt: skip
OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "SETITEM",
    "SETITEMS", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GLOBAL", "STACK_GLOBAL", "BINPERSID",
    "REDUCE", "BUILD",
}  # fmt: skip
MEMBER_LIMIT = 100_000_000  # bytes of a description, as for a safetensors header
ZIP_MAGIC = b"PK\x03\x04"
LOCAL_HEADER = 30  # bytes of a zip member's header before its name; the lengths of name and extra field end it
CONVERT = (
    'with torch and safetensors installed, in its folder: python -c "import sys, torch; from safetensors.torch import '
    "save_file; t = {}; [t.update(torch.load(f, 'cpu', weights_only=True)) for f in sys.argv[2:]]; "
    "save_file({k: v.clone().contiguous() for k, v in t.items()}, sys.argv[1], {'format': 'pt'})\" "
    "model.safetensors pytorch_model*.bin"
)


def read_torch(file: Path) -> dict[str, StoredTensor]:
    """Name -> place of every tensor of one file, a flat dict of tensors as `torch.save(model.state_dict())` writes it.

    Raises HFError for a file that is damaged, that compresses its members, that torch wrote before 1.6, or whose pickle
    holds or asks for anything but tensors.
    """
    try:
        with open(file, "rb") as opened:
            if opened.read(len(ZIP_MAGIC)) != ZIP_MAGIC:
                raise _unreadable(file, "it is no zip archive: cut off, or written by torch before 1.6")
            archive = _Archive(file, opened)
            views = _described(file, archive.read("data.pkl"))
            return {name: archive.place(name, view) for name, view in views.items()}
    except HFError:
        raise
    except OSError as error:
        raise HFError(f"cannot read {file}: {error.strerror}") from None
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:  # all that zipfile raises
        raise damaged(file, f"as a zip archive ({error})") from None


class _Storage(NamedTuple):
    dtype: np.dtype
    key: str


class _View(NamedTuple):
    """A tensor: a part of a storage. Its numbers are whatever the file says until `place` has checked them."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any


class _Word:
    """What a global of a pickle stands for: it can be called, or be the type of a storage; it cannot be changed."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[..., Any]):
        self._act = act

    def __call__(self, *arguments: Any) -> Any:
        return self._act(*arguments)

    def __setstate__(self, state: Any) -> None:  # what the opcode BUILD calls
        raise pickle.UnpicklingError("it tries to change a function")


class _Type(_Word):
    """The type of a storage: not to be called."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype

    def __call__(self, *arguments: Any) -> Any:
        raise pickle.UnpicklingError("it calls the type of a storage")


class _Table(dict):
    """An OrderedDict. Its attributes (versions of modules) are passed over."""

    def __setstate__(self, state: Any) -> None:
        pass


WORDS: Mapping[tuple[str, str], _Word] = {
    ("collections", "OrderedDict"): _Word(lambda: _Table()),
    ("torch._utils", "_rebuild_tensor_v2"): _Word(
        lambda storage, offset, shape, strides, *bookkeeping: _View(storage, offset, shape, strides)
    ),
    ("torch._utils", "_rebuild_parameter"): _Word(lambda tensor, *bookkeeping: tensor),
    ("torch._utils", "_rebuild_parameter_with_state"): _Word(lambda tensor, *bookkeeping: tensor),
    **{("torch", name): _Type(dtype) for name, dtype in DTYPES.items()},
}


class _Reader(pickle.Unpickler):
    """An unpickler that knows WORDS and storages."""

    def __init__(self, file: Path, text: bytes):
        super().__init__(io.BytesIO(text))
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in WORDS:
            what = f"its pickle asks for {module}.{name}, which no tensor needs and which was not run"
            raise _unreadable(self._file, what)
        return WORDS[module, name]

    def persistent_load(self, identity: Any) -> _Storage:
        match identity:
            case ("storage", _Type() as kind, str() as key, _, _):
                return _Storage(kind.dtype, key)
        raise pickle.UnpicklingError("it refers to something that is no storage")


class _Archive:
    """The zip archive of one file."""

    def __init__(self, file: Path, opened: BinaryIO):
        self._file, self._opened = file, opened
        self._zip = zipfile.ZipFile(opened)
        self._members = {info.filename: info for info in self._zip.infolist()}
        roots = [name[: -len("data.pkl")] for name in self._members if re.fullmatch(r"[^/]+/data\.pkl", name)]
        if len(roots) != 1:
            raise _unreadable(file, f"it has {len(roots)} members */data.pkl, where one describes its tensors")
        self._root = roots[0]  # the writer's choice
        if f"{self._root}byteorder" in self._members and self.read("byteorder") != b"little":
            raise _unreadable(file, "its numbers are not little-endian")

    def read(self, name: str) -> bytes:
        """The content of a small member."""
        member = self._plain(self._members[self._root + name])
        if member.file_size > MEMBER_LIMIT:
            raise _unreadable(self._file, f"{name} has {member.file_size:,} bytes, the limit is {MEMBER_LIMIT:,}")
        return self._zip.read(member)

    def place(self, name: str, view: _View) -> StoredTensor:
        """Where a tensor lies in the file itself. Every number of the view is checked here."""
        numbers = (view.offset, *_tuple(view.shape), *_tuple(view.strides))
        sound = isinstance(view.storage, _Storage) and all(type(n) is int and n >= 0 for n in numbers)
        if not sound or len(view.shape) != len(view.strides):
            raise damaged(self._file, f"tensor {name} is not a storage, an offset, a shape and as many strides")
        dtype, key = view.storage
        member = self._members.get(f"{self._root}data/{key}")
        if member is None:
            raise damaged(self._file, f"tensor {name} lies in storage {key}, which is not there")
        before = view.offset * dtype.itemsize
        strides = None if view.strides == _rows(view.shape) else view.strides
        tensor = StoredTensor(self._file, dtype, view.shape, self._start(member) + before, strides)
        if before + tensor.bytes > member.file_size:
            raise damaged(self._file, f"tensor {name} {tensor} ends beyond the {member.file_size} bytes of its storage")
        return tensor

    def _start(self, member: zipfile.ZipInfo) -> int:
        """The first byte of a member's content."""
        self._opened.seek(self._plain(member).header_offset)
        header = self._opened.read(LOCAL_HEADER)
        lengths = (int.from_bytes(header[place : place + 2], "little") for place in (26, 28))
        start = member.header_offset + LOCAL_HEADER + sum(lengths)
        if not header.startswith(ZIP_MAGIC) or start + member.file_size > self._file.stat().st_size:
            raise damaged(self._file, f"member {member.filename} is not where the archive's list says")
        return start

    def _plain(self, member: zipfile.ZipInfo) -> zipfile.ZipInfo:
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise _unreadable(self._file, f"member {member.filename} is compressed, so it cannot be read in place")
        return member


def _described(file: Path, text: bytes) -> dict[str, _View]:
    """The tensors that a pickle describes, by name."""
    try:
        for opcode, argument, _ in pickletools.genops(text):
            # A place of the memo is one of the bytes before it; a larger one would only claim memory.
            if opcode.name not in OPCODES or ("BINPUT" in opcode.name and int(argument or 0) > len(text)):
                raise _unreadable(file, f"its pickle uses the opcode {opcode.name}, which no tensor needs")
        found = _Reader(file, text).load()
    except HFError:
        raise
    except Exception as error:  # a pickle can fail in any way
        raise damaged(file, f"its pickle describes no tensors ({type(error).__name__}: {error})") from None
    if not isinstance(found, dict):
        raise _unreadable(file, "it holds no dict of tensors")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, _View):
            raise _unreadable(file, f"its entry {name!r} is no named tensor; what it holds must be a flat dict of them")
    return found


def _tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (None,)


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor that lies row after row."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _unreadable(file: Path, what: str) -> HFError:
    return HFError(f"{file} cannot be read: {what}. If you trust its source, convert it: {CONVERT}")
