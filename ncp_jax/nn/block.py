"""The OLMo-3 block: stacked weights of a tower's layers, and one layer as a pure function of its weights.

Shapes: B batch, T tokens, D width, H heads, K key-value heads, h head size, F feed-forward width, L layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from ncp_jax.nn.backbone import Backbone
from ncp_jax.nn.gather import Weights, all_but_layouts, gathered, spread
from ncp_jax.nn.layers import base_std, rms_norm, stacked_param, truncated_normal
from ncp_jax.ops.attention import attend, visible
from ncp_jax.ops.rope import inverse_frequencies, rope_table, rotate, yarn_attention_factor, yarn_frequencies
from ncp_jax.ops.splash import KEPT, TILE, splash_attend

# What a layer keeps for the backward pass: everything | its input | its input and matmul results, and the splash
# kernel's output and normaliser, so that the kernel runs forward once. Scores of the reference are made again.
REMAT: dict[str, Callable | None] = {
    "none": None,
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(KEPT),
    ),
}


class Blocks(nn.Module):
    """Weights of L layers, stacked on the first axis. `total_layers` (of the whole model) scales output projections."""

    shape: Backbone
    layers: int
    total_layers: int

    @nn.compact
    def __call__(self) -> Weights:
        s, L = self.shape, self.layers
        D, H, K, h, F = s.width, s.heads, s.kv, s.head_dim, s.ffn
        inner = truncated_normal(base_std(D))
        outer = truncated_normal(base_std(D) / (2 * self.total_layers) ** 0.5)
        ones = nn.initializers.ones
        head_axes = ["heads", "head_dim"]
        full = s.qk_norm == "full"

        def stacked(name, init, shape, axes):
            return stacked_param(self, name, init, L, shape, axes)

        return {
            "wq": stacked("wq", inner, [D, H, h], ["embed", *head_axes]),
            "wk": stacked("wk", inner, [D, K, h], ["embed", *head_axes]),
            "wv": stacked("wv", inner, [D, K, h], ["embed", *head_axes]),
            "wo": stacked("wo", outer, [H, h, D], [*head_axes, "embed"]),
            "q_norm": stacked("q_norm", ones, [H, h] if full else [h], head_axes if full else ["head_dim"]),
            "k_norm": stacked("k_norm", ones, [K, h] if full else [h], head_axes if full else ["head_dim"]),
            "attention_norm": stacked("attention_norm", ones, [D], ["norm"]),
            "w_gate": stacked("w_gate", inner, [D, F], ["embed", "mlp"]),
            "w_up": stacked("w_up", inner, [D, F], ["embed", "mlp"]),
            "w_down": stacked("w_down", outer, [F, D], ["mlp", "embed"]),
            "mlp_norm": stacked("mlp_norm", ones, [D], ["norm"]),
        }


def one_array_per_layer(params: Any) -> Any:
    """The same parameters with each tower's stacked leaves as tuples of L arrays, for decoding.

    A step that slices a stack copies every weight before it multiplies: 231 against 49 ms per token of a 190 M NCP on
    two cores.
    """

    def change(path, value):
        inside = any(getattr(key, "key", None) == "blocks" for key in path)
        return tuple(value) if inside and not isinstance(value, tuple) else value

    return jax.tree_util.tree_map_with_path(change, params, is_leaf=lambda x: isinstance(x, tuple))


class Sight(NamedTuple):
    """What a tower's layers see, made once per tower: masks [B, T, J] and rotary tables, windowed and full.

    J counts the keys of earlier tokens that a cache holds, then the T keys of these tokens; without a cache J = T.
    Where the splash kernel attends there are no masks, which would be as large as what it avoids, but segments.
    """

    window_mask: Array | None
    full_mask: Array | None
    window_rope: tuple[Array, Array]
    full_rope: tuple[Array, Array]
    segments_BT: Array | None = None


class KV(NamedTuple):
    """Keys (rotated) and values of one layer, [B, tokens, K, h]."""

    k: Array
    v: Array


def sight(s: Backbone, positions_BT: Array, segments_BT: Array | None, dtype) -> Sight:
    """What a tower sees of whole rows, by positions and (packed documents only) segments.

    Positions count up by one along each document (ops/splash.py says why). Rows below one tile of the splash kernel,
    such as those that shape a model's initial values, are the reference's.
    """
    ropes = rope_tables(s, positions_BT, dtype)
    if s.attention in ("splash", "interpreted") and positions_BT.shape[1] >= TILE:
        return Sight(None, None, *ropes, segments_BT)
    full_mask = visible(positions_BT, positions_BT, None, segments_BT, segments_BT)
    window_mask = visible(positions_BT, positions_BT, s.window, segments_BT, segments_BT)
    return Sight(window_mask, full_mask, *ropes)


def rope_tables(s: Backbone, positions_BT: Array, dtype) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Rotary tables of windowed and of full layers; YaRN stretches the latter alone."""
    plain = rope_table(positions_BT, inverse_frequencies(s.head_dim, s.rope_theta), 1.0, dtype)
    return plain, _yarn_table(s, positions_BT, dtype) if s.yarn else plain


def block(
    x_BTD: Array, w: Weights, s: Backbone, full: bool, see: Sight, past: KV | None = None
) -> tuple[Array, Array, KV]:
    """One layer: (output H + R, update R, its keys and values). Post-norm; QK norm before RoPE; no biases.

    Source: transformers, Olmo3DecoderLayer. `w` holds one layer's weights in x's dtype; norm scales stay f32.
    `past` holds keys and values of earlier tokens, which the masks list before this call's own.
    """
    rope, w = see.full_rope if full else see.window_rope, gathered(w)
    q_BTHh = rms_norm(jnp.einsum("BTD,DHh->BTHh", x_BTD, w["wq"]), w["q_norm"], s.eps)
    k_BTKh = rms_norm(jnp.einsum("BTD,DKh->BTKh", x_BTD, w["wk"]), w["k_norm"], s.eps)
    new = KV(rotate(k_BTKh, rope), jnp.einsum("BTD,DKh->BTKh", x_BTD, w["wv"]))
    seen = new if past is None else jax.tree.map(lambda old, own: jnp.concatenate([old, own], axis=1), past, new)
    a_BTHh = _attended(rotate(q_BTHh, rope), seen, s, full, see)
    attended_BTD = whole_width(jnp.einsum("BTHh,HhD->BTD", a_BTHh, w["wo"]))
    attended_BTD = rms_norm(attended_BTD, w["attention_norm"], s.eps)
    y_BTD = x_BTD + attended_BTD
    gated_BTF = jax.nn.silu(y_BTD @ w["w_gate"]) * (y_BTD @ w["w_up"])
    gated_BTF = nn.with_logical_constraint(gated_BTF, ("batch", "sequence", "mlp_features"))
    computed_BTD = rms_norm(whole_width(gated_BTF @ w["w_down"]), w["mlp_norm"], s.eps)
    out_BTD = whole_width(y_BTD + computed_BTD)
    return out_BTD, attended_BTD + computed_BTD, new


def whole_width(x_BTD: Array) -> Array:
    """Rows and tokens split over devices, the width whole.

    Not only for speed: if the width of a product that sums over a split axis is split over that axis as well, XLA may
    exchange rows between devices and return wrong values (jax 0.10 to 0.12, meshes of data x fsdp x tensor). So what
    joins split segments to a width, and what multiplies by them, goes through here.
    """
    return nn.with_logical_constraint(x_BTD, ("batch", "sequence", "features"))


def remat_block(s: Backbone) -> Callable[..., tuple[Array, Array, KV]]:
    """`block` under the backbone's remat policy."""
    return under_remat(block, s.remat, static_argnums=(2, 3))


def under_remat(run: Callable, remat: str, static_argnums: tuple[int, ...]) -> Callable:
    """A layer under a policy of REMAT. No layer keeps gathered weights: they are gathered again."""
    policy = REMAT[remat]
    if policy is None and spread():
        policy = all_but_layouts
    return run if policy is None else jax.checkpoint(run, policy=policy, static_argnums=static_argnums)


def cast_matrices(w: Weights, dtype) -> Weights:
    """Matrices in the compute dtype, norm scales as they are."""

    def cast(value: Array | tuple[Array, ...]):
        return jax.tree.map(lambda a: a.astype(dtype), value)

    return {name: value if name.endswith("norm") else cast(value) for name, value in w.items()}


def layer_of(w: Weights, index: int) -> Weights:
    """The weights of one layer."""
    return {name: value[index] for name, value in w.items()}


def _attended(q_BTHh: Array, seen: KV, s: Backbone, full: bool, see: Sight) -> Array:
    mask = see.full_mask if full else see.window_mask
    if mask is not None:
        return attend(q_BTHh, seen.k, seen.v, mask)
    split, window = nn.logical_to_mesh_axes(("batch", "sequence", "heads")), None if full else s.window
    return splash_attend(q_BTHh, seen.k, seen.v, window, see.segments_BT, split, s.attention == "interpreted")


def _yarn_table(s: Backbone, positions_BT: Array, dtype) -> tuple[Array, Array]:
    y = s.yarn
    assert y is not None
    frequencies = yarn_frequencies(
        s.head_dim, s.rope_theta, y.factor, y.original_length, y.beta_fast, y.beta_slow, y.round_to_int
    )
    scale = yarn_attention_factor(y.factor) if y.attention_factor is None else y.attention_factor
    return rope_table(positions_BT, frequencies, scale, dtype)
