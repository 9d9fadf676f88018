"""Random parameter trees for the `paper` reference, and derivatives of its losses by finite differences.

Shapes: D width, F ffn, H heads, K key/value heads, h head size, S segments, N codes, W = D/S, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from paper_reference import Array, Params, Sizes


def random_parameters(rng: np.random.Generator, sizes: Sizes) -> Params:
    """A tree whose every leaf is random and generic, so that each route, bias and scale changes the result."""
    d, wide = sizes.width, sizes.width // sizes.segments
    towers: dict[str, Params] = {}
    for name, layers, kind in (
        ("encoder", sizes.encoder_layers, sizes.irc_encoder),
        ("concept", sizes.concept_layers, sizes.irc_concept),
        ("decoder", sizes.decoder_layers, sizes.irc_decoder),
    ):
        towers[name] = {"blocks": _random_blocks(rng, layers, sizes)}
        if kind != "none":
            towers[name] |= {f"irc_{layer}": _random_irc(rng, layer + 2, d) for layer in range(layers)}
    concept, decoder = towers["concept"], towers["decoder"]
    if sizes.concept_from_encoder:
        concept |= _random_crc(rng, "read_encoder", sizes.concept_layers, sizes.encoder_layers - 1, d)
    if sizes.decoder_from_encoder:
        decoder |= _random_crc(rng, "read_encoder", sizes.decoder_layers, sizes.encoder_layers, d)
    if sizes.decoder_from_concept:
        decoder |= _random_crc(rng, "read_concept", sizes.decoder_layers, sizes.concept_layers, d)
    concept["heads"] = {
        "kernel": rng.normal(size=(sizes.segments, d, sizes.codes)) / math.sqrt(d),
        "bias": 0.5 * rng.normal(size=(sizes.segments, sizes.codes)),
    }
    concept["codebook"] = {"codes": rng.normal(size=(sizes.segments, sizes.codes, wide))}
    concept["final_norm"] = {"scale": _random_scale(rng, d)}
    decoder["final_norm"] = {"scale": _random_scale(rng, d)}
    return {
        "embed": {"table": rng.normal(size=(sizes.vocab, d))},
        "head": {"kernel": rng.normal(size=(d, sizes.vocab)) / math.sqrt(d)},
        **towers,
    }


def tree_map(function: Callable[..., Any], tree: Params, *rest: Params) -> Params:
    """Apply `function` leaf by leaf to nested dicts of one structure."""
    if isinstance(tree, dict):
        return {key: tree_map(function, tree[key], *(other[key] for other in rest)) for key in tree}
    return function(tree, *rest)


def random_direction(rng: np.random.Generator, params: Params) -> Params:
    """A tree of independent normal entries, shaped as `params`."""
    return tree_map(lambda leaf: rng.normal(size=np.shape(leaf)), params)


def directional_derivative(
    loss_fn: Callable[[Params], float], params: Params, direction: Params, step: float = 1e-6
) -> float:
    """Central difference of `loss_fn` along `direction`: error of order step^2 + 1e-16 * |loss| / step."""
    ahead = loss_fn(tree_map(lambda p, d: p + step * d, params, direction))
    behind = loss_fn(tree_map(lambda p, d: p - step * d, params, direction))
    return (ahead - behind) / (2 * step)


def _random_blocks(rng: np.random.Generator, layers: int, sizes: Sizes) -> Params:
    d, f, h = sizes.width, sizes.ffn, sizes.head_dim
    q_shape, k_shape = ((sizes.heads, h), (sizes.kv, h)) if sizes.qk_norm == "full" else ((h,), (h,))
    return {
        "wq": rng.normal(size=(layers, d, sizes.heads, h)) / math.sqrt(d),
        "wk": rng.normal(size=(layers, d, sizes.kv, h)) / math.sqrt(d),
        "wv": rng.normal(size=(layers, d, sizes.kv, h)) / math.sqrt(d),
        "wo": rng.normal(size=(layers, sizes.heads, h, d)) / math.sqrt(d),
        "q_norm": _random_scale(rng, layers, *q_shape),
        "k_norm": _random_scale(rng, layers, *k_shape),
        "attention_norm": _random_scale(rng, layers, d),
        "w_gate": rng.normal(size=(layers, d, f)) / math.sqrt(d),
        "w_up": rng.normal(size=(layers, d, f)) / math.sqrt(d),
        "w_down": rng.normal(size=(layers, f, d)) / math.sqrt(f),
        "mlp_norm": _random_scale(rng, layers, d),
    }


def _random_irc(rng: np.random.Generator, candidates: int, width: int) -> Params:
    # Small routers: signed weights grow with the state that they multiply, and a deep product of them explodes.
    return {
        "static": rng.normal(size=candidates) / math.sqrt(candidates),
        "w1": 0.3 * rng.normal(size=(width, candidates)) / math.sqrt(width),
        "w2": 0.3 * rng.normal(size=(candidates, candidates)) / math.sqrt(candidates),
    }


def _random_crc(rng: np.random.Generator, name: str, layers: int, sources: int, width: int) -> Params:
    routes: Params = {
        f"{name}_{layer}": {
            "diagonal": 0.5 * rng.normal(size=width),
            "w1": rng.normal(size=(width, sources)) / math.sqrt(width),
            "w2": rng.normal(size=(sources, sources)),
        }
        for layer in range(layers)
    }
    return routes | {f"{name}_norm": {"scale": _random_scale(rng, width), "bias": 0.5 * rng.normal(size=width)}}


def _random_scale(rng: np.random.Generator, *shape: int) -> Array:
    return 1 + 0.3 * rng.normal(size=shape)
