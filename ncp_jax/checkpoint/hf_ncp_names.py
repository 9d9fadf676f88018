"""Name maps of NCP's two exports and of OLMo-3.

Shapes: D width, H heads, h head size, F feed-forward width, S segments, N codes, W = D/S, V vocabulary, n sources of a
route. Names: transformers (Olmo3) and the released runtime, ncp-olmo-eval 0.1.1 (its table of shapes and key aliases).
"""

import dataclasses
from collections.abc import Iterator

from ncp_jax.checkpoint.hf_names import (
    BlockSizes,
    Layout,
    NameMap,
    Row,
    Tensor,
    attention_rows,
    blocks,
    layer_norm,
    matrix,
    mlp_rows,
    tensor,
    vector,
    vector_row,
)


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
        matrix("model.embed_tokens.weight", "embed/table", vocab, s.width, flip=False),
        *blocks(_split_rows(s), "model.layers", "blocks", layers),
        vector("model.norm.weight", "final_norm/scale", s.width),
        matrix("lm_head.weight", "head/kernel", vocab, s.width),
    ]
    return NameMap("olmo3", tuple(tensors))


def ncp_olmo3_map(s: NCPSizes) -> NameMap:
    """The released Hugging Face export: split projections, every name but the head's under `model.`."""
    D = s.block.width
    tensors = [
        matrix("model.embed_tokens.weight", "embed/table", s.vocab, D, flip=False),
        *_towers(s, _split_rows(s.block), "model.", "norm"),
        *_routes(s, "model."),
        matrix("lm_head.weight", "head/kernel", s.vocab, D),
    ]
    return NameMap("ncp_olmo3", tuple(tensors), root="model.")


def native_map(s: NCPSizes) -> NameMap:
    """The native export (`conceptlm_v22_vq`): projections fused, names as in the training code."""
    D = s.block.width
    tensors = [
        matrix("embedding.word_embeddings.weight", "embed/table", s.vocab, D, flip=False),
        *_towers(s, _fused_rows(s.block), "", "final_layernorm"),
        *_routes(s, ""),
        matrix("output_layer.weight", "head/kernel", s.vocab, D),
    ]
    return NameMap("native", tuple(tensors))


def _split_rows(s: BlockSizes) -> list[Row]:
    norms = [
        _head_norm(s, "self_attn.q_norm.weight", "q_norm", s.heads),
        _head_norm(s, "self_attn.k_norm.weight", "k_norm", s.kv_heads),
    ]
    return [*attention_rows(s), *norms, *mlp_rows(s.width, s.ffn), *_block_norms(s.width)]


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
    yield from blocks(rows, f"{root}encoder.layers", "encoder/blocks", s.encoder)
    yield from blocks(rows, f"{block}.layers", "concept/blocks", s.concept)
    yield vector(f"{block}.{norm}.weight", "concept/final_norm/scale", D)
    yield from blocks(rows, f"{root}decoder.layers", "decoder/blocks", s.decoder)
    yield vector(f"{root}decoder.{norm}.weight", "decoder/final_norm/scale", D)


def _routes(s: NCPSizes, root: str) -> Iterator[Tensor]:
    """Everything of NCP that is no block: the same names in both formats."""
    D, N, W, concept = s.block.width, s.codes, s.block.width // s.segments, f"{root}concept_predictor"
    yield from layer_norm(f"{root}concept_vq_input_norm", "concept_norm", D)
    for i in range(s.segments):
        head = f"{concept}.prediction_heads.{i}"
        yield matrix(f"{head}.weight", "concept/heads/kernel", N, D, index=i)
        yield vector(f"{head}.bias", "concept/heads/bias", N, index=i)
        yield matrix(f"{root}concept_quantizer.codebook.{i}", "concept/codebook/codes", N, W, index=i, flip=False)
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
        yield from layer_norm(f"{name}_shared_source_norm", f"{leaf}_norm", D)
        for i in range(layers):
            yield from _router(f"{name}_routes.{i}", f"{leaf}_{i}", ("residual_diag", "diagonal"), D, sources, D)
    yield from _injection(s, root)


def _injection(s: NCPSizes, root: str) -> Iterator[Tensor]:
    D = s.block.width
    yield from layer_norm(f"{root}fusion_tok_norm", "decoder/fusion_token_norm", D)
    yield from layer_norm(f"{root}fusion_hl_norm", "decoder/fusion_concept_norm", D)
    yield tensor(f"{root}fusion_norm_alpha", "decoder/fusion_scale", ())
    for i in range(s.decoder):
        name, leaf = f"{root}dd_two_route_add.concept_routes.{i}", f"decoder/reinject_{i}"
        yield vector(f"{name}.concept_norm.weight", f"{leaf}/norm_scale", D)
        yield vector(f"{name}.concept_norm.bias", f"{leaf}/norm_bias", D)
        yield vector(f"{name}.final_diag", f"{leaf}/diagonal", D)
    yield tensor(f"{root}final_read_concept_gate_logits", "decoder/gate_logits", (s.decoder, 2))


def _router(name: str, leaf: str, weights: tuple[str, str], length: int, n: int, D: int) -> Iterator[Tensor]:
    """A route: its static weights, and the two matrices that weigh n sources."""
    yield vector(f"{name}.{weights[0]}", f"{leaf}/{weights[1]}", length)
    yield matrix(f"{name}.w1.weight", f"{leaf}/w1", n, D)
    yield matrix(f"{name}.w2.weight", f"{leaf}/w2", n, n)


def _head_norm(s: BlockSizes, name: str, leaf: str, heads: int) -> Row:
    if s.full_norm:
        return name, (heads * s.head_dim,), ((leaf, Layout((heads, s.head_dim), (0, 1))),)
    return name, (s.head_dim,), ((leaf, Layout((s.head_dim,), (0,))),)


def _block_norms(D: int) -> list[Row]:
    return [
        vector_row("post_attention_layernorm.weight", "attention_norm", D),
        vector_row("post_feedforward_layernorm.weight", "mlp_norm", D),
    ]
