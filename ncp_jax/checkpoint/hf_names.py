"""Name maps: which part of which published tensor is which part of our parameter tree, one map per format.

A map is a list of tensors, each with the parts of our leaves that lie in it. A part is a view: their tensor reshaped,
one entry picked where several matrices are fused, axes reordered. Reading copies from that view, writing copies into
it, so the two directions cannot differ. Shapes follow from a model's sizes; no tensor is looked at.

Shapes: D width, H heads, K key-value heads, h head size, F feed-forward width, L layers, S segments, N codes, W = D/S,
V vocabulary, n sources of a route. Their matrices are [out, in], ours [in, out]. Names: transformers (Olmo3) and the
released runtime, ncp-olmo-eval 0.1.1 (its table of shapes and key aliases).
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

    @property
    def parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

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
    """Sizes of one OLMo-3 block."""

    width: int
    heads: int
    kv_heads: int
    ffn: int
    full_norm: bool  # QK norm over the full width; False: over each head

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclasses.dataclass(frozen=True)
class NCPSizes:
    """Sizes of one NCP model with every route of the released graph."""

    block: BlockSizes
    vocab: int
    encoder: int  # layers
    concept: int
    decoder: int
    segments: int
    codes: int


def olmo3_map(s: BlockSizes, vocab: int, layers: int) -> NameMap:
    """transformers' Olmo3ForCausalLM."""
    tensors = [
        _matrix("model.embed_tokens.weight", "embed/table", vocab, s.width, flip=False),
        *_blocks(_split_rows(s), "model", "blocks", layers),
        _vector("model.norm.weight", "final_norm/scale", s.width),
        _matrix("lm_head.weight", "head/kernel", vocab, s.width),
    ]
    return NameMap("olmo3", tuple(tensors))


def ncp_olmo3_map(s: NCPSizes) -> NameMap:
    """The released Hugging Face export: split projections, every name but the head's under `model.`."""
    D = s.block.width
    tensors = [
        _matrix("model.embed_tokens.weight", "embed/table", s.vocab, D, flip=False),
        *_towers(s, _split_rows(s.block), "model.", "norm"),
        *_routes(s, "model."),
        _matrix("lm_head.weight", "head/kernel", s.vocab, D),
    ]
    return NameMap("ncp_olmo3", tuple(tensors), root="model.")


def native_map(s: NCPSizes) -> NameMap:
    """The native export (`conceptlm_v22_vq`): projections fused, names as in the training code."""
    D = s.block.width
    tensors = [
        _matrix("embedding.word_embeddings.weight", "embed/table", s.vocab, D, flip=False),
        *_towers(s, _fused_rows(s.block), "", "final_layernorm"),
        *_routes(s, ""),
        _matrix("output_layer.weight", "head/kernel", s.vocab, D),
    ]
    return NameMap("native", tuple(tensors))


# A row of a block table: their name within a layer, their shape, our leaves in it.
Row = tuple[str, Shape, tuple[tuple[str, Layout], ...]]


def _split_rows(s: BlockSizes) -> list[Row]:
    D, H, K, h, F = s.width, s.heads, s.kv_heads, s.head_dim, s.ffn
    return [
        ("self_attn.q_proj.weight", (H * h, D), (("wq", _into_heads(H, h, D)),)),
        ("self_attn.k_proj.weight", (K * h, D), (("wk", _into_heads(K, h, D)),)),
        ("self_attn.v_proj.weight", (K * h, D), (("wv", _into_heads(K, h, D)),)),
        ("self_attn.o_proj.weight", (D, H * h), (("wo", Layout((D, H, h), (1, 2, 0))),)),
        _head_norm(s, "self_attn.q_norm.weight", "q_norm", H),
        _head_norm(s, "self_attn.k_norm.weight", "k_norm", K),
        ("mlp.gate_proj.weight", (F, D), (("w_gate", Layout((F, D), (1, 0))),)),
        ("mlp.up_proj.weight", (F, D), (("w_up", Layout((F, D), (1, 0))),)),
        ("mlp.down_proj.weight", (D, F), (("w_down", Layout((D, F), (1, 0))),)),
        *_block_norms(D),
    ]


def _fused_rows(s: BlockSizes) -> list[Row]:
    """QKV rows are [head, (q, k, v), head size]; fc1 rows are [gate; up]. As many key-value heads as heads."""
    D, H, h, F = s.width, s.heads, s.head_dim, s.ffn
    qkv = tuple((leaf, Layout((H, 3, h, D), (2, 0, 1), (1, i))) for i, leaf in enumerate(("wq", "wk", "wv")))
    fc1 = tuple((leaf, Layout((2, F, D), (1, 0), (0, i))) for i, leaf in enumerate(("w_gate", "w_up")))
    return [
        ("self_attention.linear_qkv.weight", (3 * D, D), qkv),
        ("self_attention.linear_proj.weight", (D, D), (("wo", Layout((D, H, h), (1, 2, 0))),)),
        _head_norm(s, "self_attention.q_layernorm.weight", "q_norm", H),
        _head_norm(s, "self_attention.k_layernorm.weight", "k_norm", H),
        ("mlp.linear_fc1.weight", (2 * F, D), fc1),
        ("mlp.linear_fc2.weight", (D, F), (("w_down", Layout((D, F), (1, 0))),)),
        *_block_norms(D),
    ]


def _towers(s: NCPSizes, rows: list[Row], root: str, norm: str) -> Iterator[Tensor]:
    D, block = s.block.width, f"{root}concept_predictor.hlm_block"
    yield from _blocks(rows, f"{root}encoder", "encoder/blocks", s.encoder)
    yield from _blocks(rows, block, "concept/blocks", s.concept)
    yield _vector(f"{block}.{norm}.weight", "concept/final_norm/scale", D)
    yield from _blocks(rows, f"{root}decoder", "decoder/blocks", s.decoder)
    yield _vector(f"{root}decoder.{norm}.weight", "decoder/final_norm/scale", D)


def _routes(s: NCPSizes, root: str) -> Iterator[Tensor]:
    """Everything of NCP that is no block: the same names in both formats."""
    D, N, W, concept = s.block.width, s.codes, s.block.width // s.segments, f"{root}concept_predictor"
    yield from _layer_norm(f"{root}concept_vq_input_norm", "concept_norm", D)
    for i in range(s.segments):
        head = f"{concept}.prediction_heads.{i}"
        yield _matrix(f"{head}.weight", "concept/heads/kernel", N, D, index=i)
        yield _vector(f"{head}.bias", "concept/heads/bias", N, index=i)
        yield _matrix(f"{root}concept_quantizer.codebook.{i}", "concept/codebook/codes", N, W, index=i, flip=False)
    towers = (
        (f"{root}dd_encoder_self_dd.depth_dds", "encoder", s.encoder),
        (f"{concept}.concept_self_dd.depth_dds", "concept", s.concept),
        (f"{root}dd_two_route_add.decoder_dds", "decoder", s.decoder),
    )
    for name, tower, layers in towers:  # layer i mixes the tower's input and its i + 1 outputs so far
        for i in range(layers):
            yield from _router(f"{name}.{i}", f"{tower}/irc_{i}", ("static_a", "static"), i + 2, i + 2, D)
    crosses = (
        (f"{concept}.concept_read_encoder", "concept/read_encoder", s.concept, s.encoder - 1),
        (f"{root}decoder_read_encoder", "decoder/read_encoder", s.decoder, s.encoder),
        (f"{root}decoder_read_concept", "decoder/read_concept", s.decoder, s.concept),
    )
    for name, leaf, layers, sources in crosses:
        yield from _layer_norm(f"{name}_shared_source_norm", f"{leaf}_norm", D)
        for i in range(layers):
            yield from _router(f"{name}_routes.{i}", f"{leaf}_{i}", ("residual_diag", "diagonal"), D, sources, D)
    yield from _injection(s, root)


def _injection(s: NCPSizes, root: str) -> Iterator[Tensor]:
    D = s.block.width
    yield from _layer_norm(f"{root}fusion_tok_norm", "decoder/fusion_token_norm", D)
    yield from _layer_norm(f"{root}fusion_hl_norm", "decoder/fusion_concept_norm", D)
    yield _tensor(f"{root}fusion_norm_alpha", "decoder/fusion_scale", ())
    for i in range(s.decoder):
        name, leaf = f"{root}dd_two_route_add.concept_routes.{i}", f"decoder/reinject_{i}"
        yield _vector(f"{name}.concept_norm.weight", f"{leaf}/norm_scale", D)
        yield _vector(f"{name}.concept_norm.bias", f"{leaf}/norm_bias", D)
        yield _vector(f"{name}.final_diag", f"{leaf}/diagonal", D)
    yield _tensor(f"{root}final_read_concept_gate_logits", "decoder/gate_logits", (s.decoder, 2))


def _blocks(rows: list[Row], prefix: str, leaf: str, layers: int) -> Iterator[Tensor]:
    for i in range(layers):
        for name, shape, parts in rows:
            placed = tuple(Part(f"{leaf}/{ours}", i, layout) for ours, layout in parts)
            yield Tensor(f"{prefix}.layers.{i}.{name}", shape, placed)


def _router(name: str, leaf: str, vector: tuple[str, str], length: int, n: int, D: int) -> Iterator[Tensor]:
    """A route: its vector, and the two matrices that weigh n sources."""
    yield _vector(f"{name}.{vector[0]}", f"{leaf}/{vector[1]}", length)
    yield _matrix(f"{name}.w1.weight", f"{leaf}/w1", n, D)
    yield _matrix(f"{name}.w2.weight", f"{leaf}/w2", n, n)


def _into_heads(heads: int, h: int, D: int) -> Layout:
    return Layout((heads, h, D), (2, 0, 1))


def _head_norm(s: BlockSizes, name: str, leaf: str, heads: int) -> Row:
    if s.full_norm:
        return name, (heads * s.head_dim,), ((leaf, Layout((heads, s.head_dim), (0, 1))),)
    return name, (s.head_dim,), ((leaf, Layout((s.head_dim,), (0,))),)


def _block_norms(D: int) -> list[Row]:
    return [
        ("post_attention_layernorm.weight", (D,), (("attention_norm", Layout((D,), (0,))),)),
        ("post_feedforward_layernorm.weight", (D,), (("mlp_norm", Layout((D,), (0,))),)),
    ]


def _layer_norm(name: str, leaf: str, D: int) -> Iterator[Tensor]:
    yield _vector(f"{name}.weight", f"{leaf}/scale", D)
    yield _vector(f"{name}.bias", f"{leaf}/bias", D)


def _matrix(name: str, leaf: str, rows: int, columns: int, index: int | None = None, flip: bool = True) -> Tensor:
    return _tensor(name, leaf, (rows, columns), index, (1, 0) if flip else (0, 1))


def _vector(name: str, leaf: str, length: int, index: int | None = None) -> Tensor:
    return _tensor(name, leaf, (length,), index)


def _tensor(name: str, leaf: str, shape: Shape, index: int | None = None, order: Shape | None = None) -> Tensor:
    layout = Layout(shape, tuple(range(len(shape))) if order is None else order)
    return Tensor(name, shape, (Part(leaf, index, layout),))
