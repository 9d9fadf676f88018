"""Analytic parameter counts and FLOPs of the CALM family and its autoregressive baseline, from configs alone.

A multiply-add is 2 FLOPs; a trained matrix costs 6 FLOPs per parameter and use, a frozen one 2. Counted: matrix
products, attention scores and sums. Not counted: embedding lookup, norms, activations, RoPE, distances of the energy
score, random numbers, the optimizer, recomputation under remat.

Shapes: D width, H heads, h head size, F feed-forward width, K tokens per chunk, l latent size, e noise size, V
vocabulary, N samples.
"""

from typing import Literal

from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig, EnergyHead
from ncp_jax.models.calm.heads import TIME_FEATURES
from ncp_jax.models.llama import LlamaConfig
from ncp_jax.nn.llama_block import LlamaBackbone

Attention = Literal["visible", "full"]  # keys per position: the mean that causality leaves, or all of the context
Counts = dict[str, int]

CONVENTION = (  # of training figures with attention='visible'
    "6 FLOPs per trained matrix parameter and use (backbone and input once per chunk, head once per sample, what it "
    "reads of the state alone once), 2 per frozen one (targets of the autoencoder), attention over the chunks that are "
    "visible on average, no recomputation"
)


def parameter_count(c: CalmConfig) -> Counts:
    """Trained parameters by group; the frozen autoencoder is no part of them (`autoencoder_count`)."""
    D, l, E = c.backbone.width, c.autoencoder.latent, c.input
    latent_input = _input_matrices(l, D) + 5 * D
    return {
        "embedding": c.vocab * D if E != "continuous" else 0,
        "input": (_input_matrices(c.chunk * D, D) + 5 * D if E != "continuous" else 0)
        + (latent_input if E != "discrete" else 0),
        "backbone": llama_count(c.backbone, c.layers),
        "head": sum(_head_matrices(c).values()) + _head_vectors(c),
    }


def total_parameters(counts: Counts) -> int:
    return sum(counts.values())


def llama_count(s: LlamaBackbone, layers: int) -> int:
    """Blocks and the final norm: L (4 D^2 + 3 D F) + (2 L + 1) D where heads = kv_heads."""
    return layers * (_block_matrices(s) + 2 * s.width) + s.width


def llama_parameter_count(c: LlamaConfig) -> Counts:
    """The baseline: untied table and head."""
    table = c.vocab * c.backbone.width
    return {"embedding": table, "backbone": llama_count(c.backbone, c.layers), "head": table}


def autoencoder_count(c: AutoencoderConfig) -> Counts:
    """The table counts once: it is also the output matrix."""
    encoder, decoder = (sum(part.values()) for part in (_encoder_matrices(c), _decoder_matrices(c)))
    norms = (c.encoder_layers + 1) * c.width, (c.decoder_layers + 1) * c.width
    return {
        "embedding": c.vocab * c.width,
        "encoder": encoder + norms[0] + c.width + 2 * c.latent,
        "decoder": decoder + norms[1] + c.width + c.chunk * c.width,
    }


def training_flops_per_token(c: CalmConfig, sequence: int, attention: Attention = "visible") -> float:
    """Forward and backward, per token of rows of `sequence` tokens, as this code computes it."""
    return sum(training_flops_by_part(c, sequence, attention).values())


def training_flops_by_part(c: CalmConfig, sequence: int, attention: Attention = "visible") -> dict[str, float]:
    """The same by part: input, backbone, attention, head, targets."""
    D, K, N = c.backbone.width, c.chunk, c.head.samples
    head = _head_matrices(c)
    per_chunk = {
        "input": 6.0 * (0 if c.input == "continuous" else _input_matrices(K * D, D))
        + 6.0 * (0 if c.input == "discrete" else _input_matrices(c.autoencoder.latent, D)),
        "backbone": 6.0 * c.layers * _block_matrices(c.backbone),
        "attention": 12.0 * c.layers * D * _keys(sequence // K, attention),
        "head": 6.0 * (head["sample"] * N + head["state"]),
        "targets": 2.0 * _encoder_flops(c.autoencoder),
    }
    return {name: value / K for name, value in per_chunk.items()}


def inference_flops_per_token(c: CalmConfig, context: int, candidates: int = 1) -> float:
    """Generation with a cache at a context of `context` chunks: head and decoder once per candidate.

    The convention of the paper's Table 1 with one candidate.
    """
    D, head, ae = c.backbone.width, _head_matrices(c), c.autoencoder
    matrices = c.layers * _block_matrices(c.backbone) + _input_matrices(c.chunk * D, D) + head["state"]
    sampled = head["sample"] + _decoder_flops(ae)
    return (2.0 * (matrices + candidates * sampled) + 4.0 * context * c.layers * D) / c.chunk


def autoencoder_training_flops_per_token(c: AutoencoderConfig) -> float:
    """Forward and backward of both halves."""
    return 6.0 * (_encoder_flops(c) + _decoder_flops(c)) / c.chunk


def llama_training_flops_per_token(c: LlamaConfig, sequence: int, attention: Attention = "visible") -> float:
    """Forward and backward of the baseline."""
    return 3 * _llama_forward(c, _keys(sequence, attention))


def llama_inference_flops_per_token(c: LlamaConfig, context: int) -> float:
    """Generation with a cache at a context of `context` tokens, as the paper's Table 1 counts it."""
    return _llama_forward(c, context)


def _llama_forward(c: LlamaConfig, keys: float) -> float:
    D = c.backbone.width
    return 2.0 * (c.layers * _block_matrices(c.backbone) + c.vocab * D) + 4.0 * keys * c.layers * D


def _keys(length: int, attention: Attention) -> float:
    return (length + 1) / 2 if attention == "visible" else length


def _block_matrices(s: LlamaBackbone) -> int:
    return 2 * s.width * s.head_dim * (s.heads + s.kv) + 3 * s.width * s.ffn


def _input_matrices(inputs: int, D: int) -> int:
    return inputs * 2 * D + 2 * D * D


def _head_matrices(c: CalmConfig) -> Counts:
    """Matrix parameters that are used once per sample, and once per state."""
    D, l, B = c.backbone.width, c.autoencoder.latent, c.head.blocks
    if isinstance(c.head, EnergyHead):  # of a block's 6 D^2, its first layer's D^2 read the state alone
        return {"sample": c.head.noise * D + 5 * B * D * D + D * D + D * l, "state": D * D + B * D * D}
    outputs = 2 * l if c.head.kind == "diffusion" else l
    blocks = 5 * B * D * D  # 3 D^2 modulation, 2 D^2 MLP; both depend on the time, so on the sample
    return {"sample": TIME_FEATURES * D + D * D + l * D + blocks + 2 * D * D + D * outputs, "state": D * D}


def _head_vectors(c: CalmConfig) -> int:
    """Biases and norms."""
    D, l, B = c.backbone.width, c.autoencoder.latent, c.head.blocks
    if isinstance(c.head, EnergyHead):
        return 2 * D + 4 * D + B * (2 * D + 5 * D) + 3 * D + l
    outputs = 2 * l if c.head.kind == "diffusion" else l
    return 4 * D + B * (3 * D + 2 * D + 2 * D) + 2 * D + outputs


def _encoder_matrices(c: AutoencoderConfig) -> Counts:
    D = c.width
    return {"layers": c.encoder_layers * 3 * D * c.ffn, "squeeze": c.chunk * D * D, "latent": 2 * D * c.latent}


def _decoder_matrices(c: AutoencoderConfig) -> Counts:
    D = c.width
    return {"layers": c.decoder_layers * 3 * D * c.ffn, "expand": c.chunk * D * D, "latent": D * c.latent}


def _encoder_flops(c: AutoencoderConfig) -> float:
    """Multiply-adds per chunk: half of the layers run once per token, half once per chunk."""
    parts = _encoder_matrices(c)
    return parts["layers"] * (c.chunk + 1) / 2 + parts["squeeze"] + parts["latent"]


def _decoder_flops(c: AutoencoderConfig) -> float:
    parts = _decoder_matrices(c)
    return parts["layers"] * (c.chunk + 1) / 2 + parts["expand"] + parts["latent"] + c.chunk * c.width * c.vocab
