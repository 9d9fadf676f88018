"""Analytic FLOPs and parameter counts, from configs alone.

A multiply-add is 2 FLOPs and training costs three forward passes, so a matrix costs 6 FLOPs per parameter and use.
Counted: matrix products, attention scores and sums, route mixtures. Not counted: embedding lookup, norms, activations,
RoPE, pooling, the nearest-code search (forward only: 2 D N per concept) and the like distances of an energy objective,
the optimizer, recomputation under remat.

Shapes: D width, H heads, K key-value heads, h head size, F feed-forward width, T tokens, k chunk, S segments, N codes.
"""

from typing import Literal

from ncp_jax.models.ncp.config import NCPConfig
from ncp_jax.models.olmo3 import Olmo3Config
from ncp_jax.nn.backbone import Backbone

Config = NCPConfig | Olmo3Config
Convention = Literal["visible", "full_attention"]

# What an MFU means; print it beside every figure. The second one flatters: it pays for keys that causality hides.
CONVENTIONS: dict[str, str] = {
    "visible": "6 FLOPs per matrix parameter and token (concept path at 1/k), attention over the keys that are visible "
    "on average (causal half, windows counted), no recomputation",
    "full_attention": "6 FLOPs per matrix parameter and token (concept path at 1/k), attention over all T keys of "
    "every layer (no causal half, no windows), no recomputation",
}
MULTIPLE_OF_FFN = 128  # the report's ladder rounds feed-forward widths up to it (reconstructed from Table 12)


def training_flops_per_token(
    config: Config, sequence: int, *, head: bool = True, routes: bool = True, convention: Convention = "visible"
) -> float:
    """Forward and backward FLOPs per token of rows of `sequence` tokens.

    `head` counts the output matrix once, `routes` IRC and CRC. Prediction heads and codebook mixture always count.
    """
    parts = training_flops_by_part(config, sequence, convention)
    return sum(value for name, value in parts.items() if (head or name != "head") and (routes or name != "routes"))


def training_flops_by_part(config: Config, sequence: int, convention: Convention = "visible") -> dict[str, float]:
    """The same by part: `blocks` | `encoder` `concept` `decoder` `prediction` `routes`, and `head`; FLOPs per token."""
    if sequence < config.chunk:
        raise ValueError(f"sequence {sequence} is shorter than a chunk of {config.chunk}; give at least one chunk")
    head = {"head": 6.0 * config.vocab * config.backbone.width}
    if isinstance(config, Olmo3Config):
        return {"blocks": _tower(config.backbone, config.layers, sequence, convention)} | head
    concepts = sequence // config.chunk
    rate = concepts / sequence  # concepts per token
    tower = config.backbone
    return {
        "encoder": _tower(tower, config.encoder_layers, sequence, convention),
        "concept": rate * _tower(config.concept_backbone, config.concept_layers, concepts, convention),
        "decoder": _tower(tower, config.decoder_layers, sequence, convention),
        "prediction": rate * _prediction(config),
        "routes": 6.0 * sum(per_use * uses for per_use, uses in _route_products(config, rate)),
    } | head


def ladder_flops_per_token(config: Config, sequence: int) -> float:
    """F_tok of the report's scaling ladder: blocks and visible attention; no head, no prediction heads, no routes.

    Reconstructed from Table 12: it returns every printed digit of that table's known rows, with
    feed-forward widths from `ladder_ffn`. C = F_tok * tokens.
    """
    parts = training_flops_by_part(config, sequence)
    return sum(parts.get(name, 0.0) for name in ("blocks", "encoder", "concept", "decoder"))


def ladder_ffn(width: int) -> int:
    """Feed-forward width of a ladder model: 11008/4096 of the width, rounded up to 128 (reconstructed)."""
    return -(-width * 11008 // (4096 * MULTIPLE_OF_FFN)) * MULTIPLE_OF_FFN


def visible_keys(length: int, window: int | None) -> float:
    """Mean number of keys that a causal query sees, its own included: (T + 1) / 2 when full."""
    reach = length if window is None else min(window, length)
    return (reach * (reach + 1) / 2 + (length - reach) * reach) / length


def parameter_count(config: Config) -> dict[str, int]:
    """Parameters by group, in the order of the model; groups that the config switches off are absent."""
    D, groups = config.backbone.width, {"embedding": config.vocab * config.backbone.width}
    if isinstance(config, Olmo3Config):
        groups |= {"blocks": config.layers * block_parameters(config.backbone), "final_norms": D}
    else:
        groups |= _ncp_groups(config)
    groups["head"] = config.vocab * D
    return {name: count for name, count in groups.items() if count}


def total_parameters(config: Config) -> int:
    """All parameters."""
    return sum(parameter_count(config).values())


def non_embedding_parameters(config: Config) -> int:
    """All parameters but the input embedding and the output matrix."""
    return total_parameters(config) - 2 * config.vocab * config.backbone.width


def block_parameters(s: Backbone) -> int:
    """One OLMo-3 block: 4 D^2 + 3 D F + 4 D at K = H with full-width QK norm."""
    heads = s.heads + s.kv if s.qk_norm == "full" else 2
    return _block_matrices(s) + heads * s.head_dim + 2 * s.width


def _block_matrices(s: Backbone) -> int:
    attention = 2 * s.width * s.head_dim * (s.heads + s.kv)  # queries and output, keys and values
    return attention + 3 * s.width * s.ffn


def _tower(s: Backbone, layers: int, length: int, convention: Convention) -> float:
    """FLOPs per position: 6 per matrix parameter, and 12 H h per key (scores and sums, forward and backward)."""
    total = 0.0
    for layer in range(layers):
        window = None if s.is_full(layer) else s.window
        keys = visible_keys(length, window) if convention == "visible" else length
        total += 6.0 * _block_matrices(s) + 12.0 * s.heads * s.head_dim * keys
    return total


def _prediction(c: NCPConfig) -> float:
    """FLOPs per concept of heads and mixture, and of an energy objective: each law times the distances of its codes."""
    D, S, N = c.backbone.width, c.concept.segments, c.concept.codes
    learnt = 2 if c.loss.energy_trains_codes else 1  # factors of that product with a gradient
    energy = 2.0 * (1 + learnt) * S * N**2 if c.loss.concept_objective == "energy" else 0.0
    return 6.0 * D * N * (S + 1) + energy


def _irc_towers(c: NCPConfig) -> list[tuple[int, str]]:
    """(layers, kind of IRC) of the three towers: encoder, concept module, decoder."""
    layers = (c.encoder_layers, c.concept_layers, c.decoder_layers)
    kinds = (c.routing.irc_encoder, c.routing.irc_concept, c.routing.irc_decoder)
    return list(zip(layers, kinds, strict=True))


def _cross_paths(c: NCPConfig) -> list[tuple[int, int, bool]]:
    """(target layers, sources, whether the target is the concept module) of every CRC path that is on."""
    E, C, decoder = c.encoder_layers, c.concept_layers, c.decoder_layers
    paths = [
        (c.routing.concept_from_encoder, (C, E - 1, True)),
        (c.routing.decoder_from_encoder, (decoder, E, False)),
        (c.routing.decoder_from_concept, (decoder, C, False)),
    ]
    return [path for on, path in paths if on]


def _route_products(c: NCPConfig, rate: float) -> list[tuple[int, float]]:
    """(multiply-adds of one use, uses per token) of every router and its mixture: 2 D n + n^2 for n candidates."""
    D, products = c.backbone.width, []
    for (layers, kind), uses in zip(_irc_towers(c), (1.0, rate, 1.0), strict=True):
        if kind != "none":
            products += [(2 * D * n + n * n, uses) for n in range(2, layers + 2)]
    for layers, n, in_concept in _cross_paths(c):
        products += [(2 * D * n + n * n, rate if in_concept else 1.0)] * layers
    return products


def _ncp_groups(c: NCPConfig) -> dict[str, int]:
    D, S, N = c.backbone.width, c.concept.segments, c.concept.codes
    block, paths = block_parameters(c.backbone), _cross_paths(c)
    irc = [n for layers, kind in _irc_towers(c) if kind != "none" for n in range(2, layers + 2)]
    return {
        "encoder": c.encoder_layers * block,
        "concept": c.concept_layers * block,
        "decoder": c.decoder_layers * block,
        "final_norms": 2 * D,  # concept module and decoder
        "concept_norm": {"layernorm": 2 * D, "rms": D, "none": 0}[c.concept.norm],
        "prediction_heads": S * (D * N + N),
        "codebooks": N * D,
        "irc": sum(n + D * n + n * n for n in irc),
        "crc": sum(layers * (D + D * n + n * n) for layers, n, _ in paths),
        "crc_norms": 2 * D * len(paths),
        "reinjection": 3 * D * c.decoder_layers if c.concept.reinject else 0,
        "fusion": {"normed_add": 4 * D + 1, "scalar_gate": 1, "add": 0}[c.concept.fusion],
        "gates": 2 * c.decoder_layers if c.concept.reinject else 0,
    }
