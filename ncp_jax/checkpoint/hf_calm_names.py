"""Name maps of the CALM family: the autoencoder, the language model with its frozen autoencoder, the LLaMA baseline.

Tied weights stand in the official files under both of their names. The frozen autoencoder's leaves are
`autoencoder/...`, beside those that were trained. Shapes: V vocabulary, D width, F feed-forward width, K tokens per
chunk, l latent size. Names: the official modeling_autoencoder.py, modeling_energy.py, modeling_flow.py,
modeling_diffusion.py; transformers (Llama).
"""

import dataclasses
from collections.abc import Iterator

from ncp_jax.checkpoint.hf_names import (
    BlockSizes,
    NameMap,
    Row,
    Tensor,
    attention_rows,
    blocks,
    layer_norm,
    linear,
    matrix,
    matrix_row,
    mlp_rows,
    vector,
    vector_row,
)

FROZEN = "autoencoder"  # first part of the frozen leaves' names
FROZEN_ROOT = "ae_model."  # and of their tensors'
TIME_FEATURES = 256  # of the transport networks (official TimestepEmbedder)


@dataclasses.dataclass(frozen=True)
class AutoencoderSizes:
    """Sizes of one autoencoder."""

    vocab: int
    chunk: int
    width: int
    ffn: int
    latent: int
    encoder_layers: int
    decoder_layers: int


@dataclasses.dataclass(frozen=True)
class CalmSizes:
    """Sizes of one CALM language model."""

    block: BlockSizes
    layers: int
    autoencoder: AutoencoderSizes
    head: str  # energy, flow, diffusion
    head_blocks: int
    noise: int  # of the energy head


def llama_map(s: BlockSizes, vocab: int, layers: int) -> NameMap:
    """transformers' LlamaForCausalLM with a head of its own."""
    tensors = [
        matrix("model.embed_tokens.weight", "embed/table", vocab, s.width, flip=False),
        *blocks(_llama_rows(s), "model.layers", "blocks", layers),
        vector("model.norm.weight", "final_norm/scale", s.width),
        matrix("lm_head.weight", "head/kernel", vocab, s.width),
    ]
    return NameMap("llama", tuple(tensors))


def autoencoder_map(s: AutoencoderSizes) -> NameMap:
    """The official Autoencoder: one table under two names."""
    return NameMap("calm_autoencoder", tuple(_autoencoder(s, "", "")), copies=(_table_copy(""),))


def calm_map(s: CalmSizes) -> NameMap:
    """The official EnergyTransformer, FlowTransformer or DiffusionTransformer: the autoencoder is in the same file."""
    D, K = s.block.width, s.autoencoder.chunk
    head = list(_energy(s) if s.head == "energy" else _transport(s))
    tensors = [
        matrix("transformer.embed_tokens.weight", "embed/table", s.autoencoder.vocab, D, flip=False),
        *blocks(_llama_rows(s.block), "transformer.layers", "blocks", s.layers),
        vector("transformer.norm.weight", "final_norm/scale", D),
        *linear("embed_proj.0", "input/in", 2 * D, K * D),
        *linear("embed_proj.2", "input/out", D, 2 * D),
        *layer_norm("embed_proj.3", "input/norm", D),
        *head,
        *_autoencoder(s.autoencoder, FROZEN_ROOT, f"{FROZEN}/"),
    ]
    twins = [(tensor.name.replace("mlp_generator.", "generative_head.", 1), tensor.name) for tensor in head]
    copies = (*(twins if s.head == "energy" else ()), _table_copy(FROZEN_ROOT))
    return NameMap("calm", tuple(tensors), copies=copies)


def _llama_rows(s: BlockSizes) -> list[Row]:
    return [
        *attention_rows(s),
        *mlp_rows(s.width, s.ffn),
        vector_row("input_layernorm.weight", "attention_norm", s.width),
        vector_row("post_attention_layernorm.weight", "mlp_norm", s.width),
    ]


def _autoencoder(s: AutoencoderSizes, root: str, leaf: str) -> Iterator[Tensor]:
    D, K, l = s.width, s.chunk, s.latent
    rows = [*mlp_rows(D, s.ffn), vector_row("layernorm.weight", "mlp_norm", D)]
    encoder, decoder = f"{root}encoder", f"{root}decoder"
    yield matrix(f"{encoder}.embed_tokens.weight", f"{leaf}embed/table", s.vocab, D, flip=False)
    yield from blocks(rows, f"{encoder}.encoder_layers", f"{leaf}encoder/blocks", s.encoder_layers)
    yield from linear(f"{encoder}.squeeze_layer", f"{leaf}encoder/squeeze", D, K * D)
    yield vector(f"{encoder}.norm.weight", f"{leaf}encoder/norm/scale", D)
    yield from linear(f"{encoder}.hidden_to_latent", f"{leaf}encoder/latent", 2 * l, D)
    yield from linear(f"{decoder}.latent_to_hidden", f"{leaf}decoder/latent", D, l)
    yield from blocks(rows, f"{decoder}.decoder_layers", f"{leaf}decoder/blocks", s.decoder_layers)
    yield from linear(f"{decoder}.expand_layer", f"{leaf}decoder/expand", K * D, D)
    yield vector(f"{decoder}.norm.weight", f"{leaf}decoder/norm/scale", D)


def _table_copy(root: str) -> tuple[str, str]:
    return f"{root}decoder.lm_head_weight", f"{root}encoder.embed_tokens.weight"


def _energy(s: CalmSizes) -> Iterator[Tensor]:
    D, name, leaf = s.block.width, "mlp_generator", "generator"
    rows = [
        vector_row("in_ln.weight", "norm_scale", D), vector_row("in_ln.bias", "norm_bias", D),
        matrix_row("linears.0.weight", "w1", D, 2 * D), vector_row("linears.0.bias", "b1", D),
        matrix_row("linears.2.weight", "w2", D, D), vector_row("linears.2.bias", "b2", D),
        matrix_row("linears.4.weight", "w3", 2 * D, D), vector_row("linears.4.bias", "b3", 2 * D),
        matrix_row("down_proj.weight", "w_down", D, D), vector_row("down_proj.bias", "b_down", D),
    ]  # fmt: skip
    yield from linear(f"{name}.noise_embd", f"{leaf}/noise", D, s.noise)
    yield from layer_norm(f"{name}.norm_noise", f"{leaf}/noise_norm", D)
    yield from linear(f"{name}.hidden_embd", f"{leaf}/hidden", D, D)
    yield from layer_norm(f"{name}.norm_hidden", f"{leaf}/hidden_norm", D)
    yield from blocks(rows, f"{name}.mlp_blocks", f"{leaf}/blocks", s.head_blocks)
    yield from layer_norm(f"{name}.final_layer.in_ln", f"{leaf}/out_norm", D)
    yield from linear(f"{name}.final_layer.linears.0", f"{leaf}/out1", D, D)
    yield from linear(f"{name}.final_layer.linears.2", f"{leaf}/out2", s.autoencoder.latent, D)


def _transport(s: CalmSizes) -> Iterator[Tensor]:
    D, l, name, leaf = s.block.width, s.autoencoder.latent, "generative_head.net", "generator"
    yield from linear(f"{name}.time_embed.mlp.0", f"{leaf}/time1", D, TIME_FEATURES)
    yield from linear(f"{name}.time_embed.mlp.2", f"{leaf}/time2", D, D)
    yield from linear(f"{name}.cond_embed", f"{leaf}/state", D, D)
    yield from linear(f"{name}.input_proj", f"{leaf}/input", D, l)
    for i in range(s.head_blocks):
        block, ours = f"{name}.res_blocks.{i}", f"{leaf}/block_{i}"
        yield from layer_norm(f"{block}.in_ln", f"{ours}/norm", D)
        yield from linear(f"{block}.mlp.0", f"{ours}/mlp1", D, D)
        yield from linear(f"{block}.mlp.2", f"{ours}/mlp2", D, D)
        yield from linear(f"{block}.adaLN_modulation.1", f"{ours}/modulation", 3 * D, D)
    yield from linear(f"{name}.final_layer.linear", f"{leaf}/out", l * (2 if s.head == "diffusion" else 1), D)
    yield from linear(f"{name}.final_layer.adaLN_modulation.1", f"{leaf}/out_modulation", 2 * D, D)
