"""The optimizer: one Optax chain from the leaf table, and the sharding of its state.

clip by global norm -> per leaf: Muon or AdamW direction u -> W <- W - lr (u + decay W). Decay is decoupled and
multiplied by the learning rate of its group. Step counters live in the optimizer state, one per group, so that a
restored state continues the schedule where it stopped.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from ncp_jax.optim.config import OptimConfig
from ncp_jax.optim.leaves import Leaf, LeafError
from ncp_jax.optim.muon import (
    at_least_f32,
    leaf_by_leaf,
    moonlight,
    newton_schulz,
    path_name,
    scale_by_muon,
    spectral,
)
from ncp_jax.optim.schedules import learning_rate, plan
from ncp_jax.optim.spread import layer_parallel


def build(
    config: OptimConfig, leaves: Sequence[Leaf], params_abstract: Any, total_steps: int, tokens_per_step: int
) -> optax.GradientTransformation:
    """The whole update of a parameter tree, to be applied with optax.apply_updates.

    Frozen leaves keep every bit (but for subnormal numbers, which an XLA addition may flush to 0), hold no state, and
    do not count in the gradient norm. State is float32 or wider.

    Args:
        leaves: leaf_table(params_abstract, rules, config).
        params_abstract: where its leaves carry NamedShardings, Muon can share its matrices out over their mesh.
        total_steps, tokens_per_step: length of the schedule, and what a schedule in tokens divides by.
    Raises LeafError where table and tree differ, or where a trained leaf is narrower than float32; ConfigError for a
    schedule that does not fit.
    """
    _check(leaves, params_abstract)
    optimizers = {leaf.path: leaf.optimizer for leaf in leaves}
    schedule = plan(config.schedule, total_steps, tokens_per_step)
    decay = decay_weights({leaf.path: leaf.weight_decay for leaf in leaves})
    transforms = {
        "muon": lambda: optax.chain(
            _muon(config, leaves, params_abstract),
            decay,
            optax.scale_by_learning_rate(learning_rate(schedule, config.muon_learning_rate)),
        ),
        "adamw": lambda: optax.chain(
            optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_eps),
            decay,
            optax.scale_by_learning_rate(learning_rate(schedule, config.adam_learning_rate)),
        ),
        "frozen": hold,
    }
    labels = jax.tree_util.tree_map_with_path(lambda path, _: optimizers[path_name(path)], params_abstract)
    groups = optax.partition({name: make() for name, make in transforms.items() if name in optimizers.values()}, labels)
    if config.clip is None:
        return groups
    trained = jax.tree.map(lambda label: label != "frozen", labels)
    return optax.chain(optax.masked(optax.clip_by_global_norm(config.clip), trained), groups)


def state_shardings(
    tx: optax.GradientTransformation, params_abstract: Any, param_shardings: Any, replicated: Any
) -> Any:
    """A tree like tx.init(params): each moment is sharded as its parameter, every counter is `replicated`.

    Runs under jax.eval_shape alone, so it also works beneath a mesh of devices that do not exist here.
    """
    abstract = jax.eval_shape(tx.init, params_abstract)

    def masked(value):
        return isinstance(value, optax.MaskedNode)  # a leaf that another group holds; not a place for a sharding

    return optax.tree_map_params(
        partial(jax.eval_shape, tx.init),
        lambda value, sharding: value if masked(value) else sharding,
        abstract,
        param_shardings,
        transform_non_params=lambda _: replicated,
        is_leaf=masked,
    )


def decay_weights(rates: Mapping[str, float]) -> optax.GradientTransformation:
    """Adds rate x W to the update of each leaf, by path. A leaf with rate 0 passes untouched, bit for bit."""

    def update(updates, state, params=None):
        def add(path, u, p):
            rate = rates[path_name(path)]
            return u + rate * p.astype(u.dtype) if rate else u

        return jax.tree_util.tree_map_with_path(add, updates, params), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def hold() -> optax.GradientTransformation:
    """Updates of frozen leaves: minus zero, the one number that leaves any other, 0 and -0 included, as it is."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: jnp.full_like(u, -0.0), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _muon(config: OptimConfig, leaves: Sequence[Leaf], params_abstract: Any) -> optax.GradientTransformation:
    dtype = jnp.bfloat16 if config.newton_schulz_dtype == "bfloat16" else None
    rule = partial(newton_schulz, steps=config.newton_schulz_steps, dtype=dtype)
    matrices = {leaf.path: leaf.matrix for leaf in leaves if leaf.matrix is not None}
    shardings = _shardings(config, matrices, params_abstract)
    return scale_by_muon(
        matrices=matrices,
        factor=moonlight if config.scale == "moonlight" else partial(spectral, scale=config.spectral_scale),
        momentum=config.momentum,
        nesterov=config.nesterov,
        directions=(
            leaf_by_leaf(matrices, rule)
            if shardings is None
            else layer_parallel(matrices, shardings, config.newton_schulz_steps, dtype)
        ),
    )


def _shardings(config: OptimConfig, matrices: Iterable[str], params_abstract: Any) -> dict[str, NamedSharding] | None:
    """Of the leaves made of matrices, where these are to be spread over devices; None: leaf by leaf."""
    layout, wanted = config.newton_schulz_layout, set(matrices)
    tree = jax.tree_util.tree_flatten_with_path(params_abstract)[0]
    placed = {path_name(path): getattr(leaf, "sharding", None) for path, leaf in tree}
    known = {name: s for name, s in placed.items() if name in wanted and isinstance(s, NamedSharding)}
    if known.keys() == wanted and (layout == "layers" or any(s.mesh.size > 1 for s in known.values())):
        return known if layout != "leaf" else None
    if layout == "layers":
        raise LeafError(
            "optim.newton_schulz_layout 'layers' needs to know how parameters are split; build with "
            "ShapeDtypeStructs that carry NamedShardings, or use 'leaf'"
        )
    return None


def _check(leaves: Sequence[Leaf], params_abstract: Any) -> None:
    tree = jax.tree_util.tree_flatten_with_path(params_abstract)[0]
    table, found = {leaf.path: leaf for leaf in leaves}, {path_name(path): leaf for path, leaf in tree}
    if table.keys() != found.keys():
        raise LeafError(
            f"leaf table and parameters differ: missing from the table {sorted(found.keys() - table.keys())}, "
            f"missing from the parameters {sorted(table.keys() - found.keys())}; build the table from the same tree"
        )
    for path, leaf in table.items():
        dtype, shape = found[path].dtype, tuple(found[path].shape)
        if shape != leaf.shape:
            raise LeafError(f"parameter {path} has shape {list(shape)}, the leaf table says {list(leaf.shape)}")
        if leaf.optimizer != "frozen" and at_least_f32(dtype) != dtype:
            raise LeafError(f"parameter {path} is {dtype}; trained parameters must be float32 or wider, cast it first")
