"""Name maps: which part of which published tensor is which part of our parameter tree, and what maps are made of.

A map is a list of tensors, each with the parts of our leaves that lie in it. A part is a view: their tensor reshaped,
one entry picked where several matrices are fused, axes reordered. Reading copies from that view, writing copies into
it, so the two directions cannot differ. Shapes follow from a model's sizes; no tensor is looked at.

Their matrices are [out, in], ours [in, out]. The maps: hf_ncp_names.py (NCP, OLMo-3), hf_calm_names.py (CALM, LLaMA).
Shapes: D width, H heads, K key-value heads, h head size, F feed-forward width.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a slice of one of our leaves lies in one of their tensors."""

    split: Shape  # their tensor, reshaped
    order: tuple[int, ...]  # its axes in our order, the picked one left out
    pick: tuple[int, int] | None = None  # (axis, entry) of a fused tensor

    def ours(self, theirs: np.ndarray) -> np.ndarray:
        """Our slice, as a view of their contiguous tensor."""
        parts = theirs.reshape(self.split)
        if self.pick is not None:
            axis, entry = self.pick
            parts = parts[(slice(None),) * axis + (entry,)]
        return parts.transpose(self.order)

    @property
    def shape(self) -> Shape:
        """Of our slice."""
        kept = [size for axis, size in enumerate(self.split) if self.pick is None or axis != self.pick[0]]
        return tuple(kept[axis] for axis in self.order)


class Part(NamedTuple):
    """Where a slice goes: a leaf, and the entry on its first axis (layer or segment); None: the whole leaf."""

    leaf: str
    at: int | None
    layout: Layout


class Tensor(NamedTuple):
    """One of their tensors."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class NameMap:
    """All tensors of one model in one format."""

    format: str
    tensors: tuple[Tensor, ...]
    root: str = ""  # leading part of names that a checkpoint may leave out
    copies: tuple[tuple[str, str], ...] = ()  # (another name of a tensor, its name): equal values, either may be absent

    @property
    def parameters(self) -> int:
        """Copies count once."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Every name, copies included -> shape."""
        shapes = {tensor.name: tensor.shape for tensor in self.tensors}
        return shapes | {copy: shapes[name] for copy, name in self.copies}

    def leaves(self) -> dict[str, Shape]:
        """Our leaf -> its shape."""
        counts: dict[str, int] = {}
        shapes: dict[str, Shape] = {}
        for part in (part for tensor in self.tensors for part in tensor.parts):
            stacked = part.at is not None
            counts[part.leaf] = counts.get(part.leaf, 0) + 1
            shapes[part.leaf] = (counts[part.leaf], *part.layout.shape) if stacked else part.layout.shape
        return shapes


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of one block of OLMo-3, or of LLaMA, which has no QK norm."""

    width: int
    heads: int
    kv_heads: int
    ffn: int
    full_norm: bool = True  # QK norm over the full width; False: over each head

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


# A row of a block table: their name within a layer, their shape, our leaves in it.
Row = tuple[str, Shape, tuple[tuple[str, Layout], ...]]


def tensor(name: str, leaf: str, shape: Shape, index: int | None = None, order: Shape | None = None) -> Tensor:
    """Of any shape, its axes in our order; at an entry of a stacked leaf, or the whole leaf."""
    layout = Layout(shape, tuple(range(len(shape))) if order is None else order)
    return Tensor(name, shape, (Part(leaf, index, layout),))


def matrix(name: str, leaf: str, rows: int, columns: int, index: int | None = None, flip: bool = True) -> Tensor:
    """Their [rows, columns], ours flipped; at an entry of a stacked leaf, or the whole leaf."""
    return tensor(name, leaf, (rows, columns), index, (1, 0) if flip else (0, 1))


def vector(name: str, leaf: str, length: int, index: int | None = None) -> Tensor:
    """The same on both sides."""
    return tensor(name, leaf, (length,), index)


def linear(name: str, leaf: str, outputs: int, inputs: int) -> Iterator[Tensor]:
    """A matrix and its bias."""
    yield matrix(f"{name}.weight", f"{leaf}/kernel", outputs, inputs)
    yield vector(f"{name}.bias", f"{leaf}/bias", outputs)


def layer_norm(name: str, leaf: str, width: int) -> Iterator[Tensor]:
    """Scale and bias."""
    yield vector(f"{name}.weight", f"{leaf}/scale", width)
    yield vector(f"{name}.bias", f"{leaf}/bias", width)


def blocks(rows: list[Row], name: str, leaf: str, layers: int) -> Iterator[Tensor]:
    """The tensors `name.i.row` of stacked layers."""
    for i in range(layers):
        for row, shape, parts in rows:
            placed = tuple(Part(f"{leaf}/{ours}", i, layout) for ours, layout in parts)
            yield Tensor(f"{name}.{i}.{row}", shape, placed)


def matrix_row(name: str, leaf: str, outputs: int, inputs: int) -> Row:
    """A matrix of every layer."""
    return name, (outputs, inputs), ((leaf, Layout((outputs, inputs), (1, 0))),)


def vector_row(name: str, leaf: str, length: int) -> Row:
    """A vector of every layer."""
    return name, (length,), ((leaf, Layout((length,), (0,))),)


def attention_rows(s: BlockSizes) -> list[Row]:
    """The four projections as transformers splits them."""
    D, H, K, h = s.width, s.heads, s.kv_heads, s.head_dim
    return [
        ("self_attn.q_proj.weight", (H * h, D), (("wq", Layout((H, h, D), (2, 0, 1))),)),
        ("self_attn.k_proj.weight", (K * h, D), (("wk", Layout((K, h, D), (2, 0, 1))),)),
        ("self_attn.v_proj.weight", (K * h, D), (("wv", Layout((K, h, D), (2, 0, 1))),)),
        ("self_attn.o_proj.weight", (D, H * h), (("wo", Layout((D, H, h), (1, 2, 0))),)),
    ]


def mlp_rows(D: int, F: int) -> list[Row]:
    """SwiGLU's three matrices."""
    return [
        matrix_row("mlp.gate_proj.weight", "w_gate", F, D),
        matrix_row("mlp.up_proj.weight", "w_up", F, D),
        matrix_row("mlp.down_proj.weight", "w_down", D, F),
    ]
