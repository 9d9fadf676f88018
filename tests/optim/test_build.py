"""The whole optimizer: groups, decay, clipping, frozen leaves, AdamW parity, state dtypes and shardings."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ncp_jax.optim.build import build, state_shardings
from ncp_jax.optim.config import OptimConfig, ScheduleConfig
from ncp_jax.optim.leaves import LeafError, LeafRule, leaf_table
from ncp_jax.optim.schedules import learning_rates

RULES = (
    LeafRule("frozen/.*", "backbone", "frozen"),
    LeafRule("blocks/w", "mlp", "muon", ((-2,), (-1,))),
    LeafRule("blocks/norm", "norm", "adamw", decay="none"),
    LeafRule("embed", "embedding", "adamw", decay="embedding"),
    LeafRule("head", "head", "adamw"),
)
CONSTANT = ScheduleConfig(kind="constant", warmup=0)


def parameters(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = {"frozen": {"w": (4, 3)}, "blocks": {"w": (2, 6, 8), "norm": (2, 6)}, "embed": (9, 6), "head": (6, 9)}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def optimizer(config, params, rules=RULES, total=10):
    return build(config, leaf_table(params, rules, config), jax.eval_shape(lambda: params), total, 100)


def run(tx, params, gradients):
    state, step = tx.init(params), jax.jit(tx.update)
    for g in gradients:
        updates, state = step(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_zero_gradients_decay_each_group_at_its_own_rate():
    config = OptimConfig(
        muon_learning_rate=0.1, adam_learning_rate=0.3, muon_weight_decay=0.1, adam_weight_decay=0.2,
        schedule=ScheduleConfig(kind="wsd", warmup=0, decay=3, final_fraction=0.25),
    )  # fmt: skip
    start = parameters()
    start["blocks"]["norm"] = start["blocks"]["norm"].at[0, 0].set(-0.0)
    zeros = jax.tree.map(jnp.zeros_like, start)
    end, _ = run(optimizer(config, start, total=3), start, [zeros] * 3)
    rates = [learning_rates(config, 3, 100, s) for s in range(3)]
    muon = np.prod([1 - 0.1 * r["learning_rate/muon"] for r in rates])
    adam = np.prod([1 - 0.2 * r["learning_rate/adamw"] for r in rates])
    assert muon == pytest.approx((1 - 0.01 * 0.75) * (1 - 0.01 * 0.5) * (1 - 0.01 * 0.25))
    np.testing.assert_allclose(end["blocks"]["w"], muon * start["blocks"]["w"], rtol=1e-6)
    np.testing.assert_allclose(end["head"], adam * start["head"], rtol=1e-6)
    for before, after in ((start["embed"], end["embed"]), (start["blocks"]["norm"], end["blocks"]["norm"])):
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()


def test_zero_gradient_kernel_among_others():
    config = OptimConfig(muon_learning_rate=0.1, muon_weight_decay=0.1, schedule=CONSTANT)
    start = parameters()
    gradients = []
    for seed in range(5):
        g = parameters(seed + 1)
        g["blocks"]["w"] = g["blocks"]["w"].at[1].set(0.0)
        gradients.append(g)
    end, _ = run(optimizer(config, start), start, gradients)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(end))
    np.testing.assert_allclose(end["blocks"]["w"][1], 0.99**5 * start["blocks"]["w"][1], rtol=1e-6)
    assert not np.allclose(end["blocks"]["w"][0], 0.99**5 * start["blocks"]["w"][0], rtol=1e-2)


def test_frozen_leaves_keep_every_bit_hold_no_state_and_do_not_clip():
    config = OptimConfig(schedule=CONSTANT, clip=1.0)
    start = parameters()
    start["frozen"]["w"] = start["frozen"]["w"].at[0].set(jnp.array([-0.0, 0.0, 1e-37]))
    gradients = [parameters(seed) for seed in range(1, 4)]
    loud = [{**g, "frozen": {"w": jnp.full((4, 3), jnp.inf)}} for g in gradients]
    tx = optimizer(config, start)
    end, state = run(tx, start, loud)
    assert np.asarray(end["frozen"]["w"]).tobytes() == np.asarray(start["frozen"]["w"]).tobytes()
    assert not any(leaf.shape == (4, 3) for leaf in jax.tree.leaves(state))
    quiet, _ = run(tx, start, [{**g, "frozen": {"w": jnp.zeros((4, 3))}} for g in gradients])
    np.testing.assert_array_equal(end["head"], quiet["head"])


def test_clip_scales_the_whole_gradient():
    """Adam's first moment is (1 - b1) x the clipped gradient."""
    config, params = OptimConfig(clip=0.5, schedule=CONSTANT), parameters()
    gradients = parameters(1)
    trained = {key: value for key, value in gradients.items() if key != "frozen"}
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(trained)))
    _, state = run(optimizer(config, params), params, [gradients])
    moment = optax.tree.get_all_with_path(state, "mu")[0][1]["head"]
    np.testing.assert_allclose(moment, 0.1 * 0.5 / norm * gradients["head"], rtol=1e-5)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_adamw_is_optax_adamw(clip):
    config = OptimConfig(
        optimizer="adamw", adam_learning_rate=0.02, adam_weight_decay=0.3, embedding_weight_decay=0.3, clip=clip,
        schedule=ScheduleConfig(kind="cosine", warmup=3),
    )  # fmt: skip
    params = {key: value for key, value in parameters().items() if key != "frozen"}
    mask = {"blocks": {"w": True, "norm": False}, "embed": True, "head": True}
    theirs = optax.adamw(
        lambda step: jnp.asarray([learning_rates(config, 6, 100, s)["learning_rate/adamw"] for s in range(6)])[step],
        b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.3, mask=mask,
    )  # fmt: skip
    if clip:
        theirs = optax.chain(optax.clip_by_global_norm(clip), theirs)
    gradients = [{k: v for k, v in parameters(seed).items() if k != "frozen"} for seed in range(1, 7)]
    ours, _ = run(optimizer(config, params, total=6), params, gradients)
    expected, _ = run(theirs, params, gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours, expected)


def test_scanned_and_unscanned_models_take_the_same_step():
    config = OptimConfig(muon_learning_rate=0.1, adam_learning_rate=0.1, schedule=CONSTANT, clip=None)
    params, gradients = parameters(), parameters(1)
    rules = (
        LeafRule(r"layer_\d/w", "mlp", "muon", ((-2,), (-1,))),
        LeafRule(r".*/norm", "norm", "adamw", decay="none"),
    )

    def layers(tree):
        return {f"layer_{i}": jax.tree.map(operator.itemgetter(i), tree["blocks"]) for i in range(2)}

    scanned, _ = run(optimizer(config, params), params, [gradients])
    flat, _ = run(optimizer(config, layers(params), rules), layers(params), [layers(gradients)])
    for i in range(2):
        for name in ("w", "norm"):
            np.testing.assert_allclose(scanned["blocks"][name][i], flat[f"layer_{i}"][name], atol=1e-5)


def test_muon_runs_on_hidden_kernels_through_the_whole_chain():
    config = OptimConfig(muon_learning_rate=1.0, muon_weight_decay=0.0, clip=1.0, scale="spectral", schedule=CONSTANT)
    params = parameters()
    end, _ = run(optimizer(config, params), params, [parameters(1)])
    singular = np.linalg.svd(end["blocks"]["w"] - params["blocks"]["w"], compute_uv=False) / np.sqrt(8)
    assert (singular.max(-1) / singular.min(-1) < 3).all()
    assert singular.max() < 1.25


def test_spectral_recipe_is_moonlight_at_a_fifth_of_the_rate():
    params, gradients = parameters(), [parameters(1)]
    one = OptimConfig(muon_learning_rate=6e-3, muon_weight_decay=0.0, scale="spectral", schedule=CONSTANT)
    two = OptimConfig(muon_learning_rate=3e-2, muon_weight_decay=0.0, scale="moonlight", schedule=CONSTANT)
    first, second = (run(optimizer(config, params), params, gradients)[0]["blocks"]["w"] for config in (one, two))
    np.testing.assert_allclose(first, second, atol=1e-7)


def test_float64_state_and_update():
    with jax.enable_x64(True):
        params = parameters(dtype=np.float64)
        end, state = run(optimizer(OptimConfig(), params), params, [params])
        assert {leaf.dtype.name for leaf in jax.tree.leaves(end)} == {"float64"}
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float64", "int32"}


def test_narrow_or_foreign_trees_are_refused():
    config, params = OptimConfig(), parameters()
    leaves = leaf_table(params, RULES, config)
    with pytest.raises(LeafError, match="bfloat16; trained"):
        build(config, leaves, {**params, "head": params["head"].astype(jnp.bfloat16)}, 10, 1)
    with pytest.raises(LeafError, match="missing from the parameters"):
        build(config, leaves, {key: params[key] for key in ("embed", "head")}, 10, 1)
    with pytest.raises(LeafError, match="head has shape"):
        build(config, leaves, {**params, "head": jnp.zeros((1, 1))}, 10, 1)
    frozen_bf16 = {**params, "frozen": {"w": params["frozen"]["w"].astype(jnp.bfloat16)}}
    end, _ = run(build(config, leaves, frozen_bf16, 10, 1), frozen_bf16, [params])
    assert end["frozen"]["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("optimizer_name", ["muon", "adamw"])
def test_state_is_sharded_as_its_parameters(optimizer_name):
    """With abstract devices: nothing may run, so every init happens under a trace."""
    config, params = OptimConfig(optimizer=optimizer_name), parameters()
    mesh = jax.sharding.AbstractMesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs: dict[str, Any] = {
        "frozen": {"w": P()}, "blocks": {"w": P(None, "fsdp", "tensor"), "norm": P(None, "fsdp")},
        "embed": P("tensor", "fsdp"), "head": P("fsdp", "tensor"),
    }  # fmt: skip
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
    replicated = NamedSharding(mesh, P())
    tx, abstract = optimizer(config, params), jax.eval_shape(lambda: params)

    def traced_init(params):
        assert isinstance(jnp.zeros(()), jax.core.Tracer)
        return tx.init(params)

    watched = optax.GradientTransformation(traced_init, tx.update)
    result: Any = state_shardings(watched, abstract, shardings, replicated)
    jax.tree.map(
        lambda sharding, _: sharding, result, jax.eval_shape(tx.init, abstract)
    )  # same structure, or ValueError
    names = {jax.tree_util.keystr(path): leaf.spec for path, leaf in jax.tree_util.tree_flatten_with_path(result)[0]}
    moments = {key: spec for key, spec in names.items() if "count" not in key}
    assert len(moments) == (7 if optimizer_name == "muon" else 8)
    assert all(spec == P() for key, spec in names.items() if "count" in key)
    for key, spec in moments.items():
        assert spec == next(specs["blocks"][n] if n in ("w", "norm") else specs[n]
                            for n in ("embed", "head", "norm", "w") if f"'{n}'" in key), key  # fmt: skip


def test_state_born_sharded_on_one_device():
    config, params = OptimConfig(), parameters()
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    tx = optimizer(config, params)
    everywhere = jax.tree.map(lambda _: NamedSharding(mesh, P()), params)
    shardings = state_shardings(tx, params, everywhere, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init, out_shardings=shardings)(params)
    jax.tree.map(np.testing.assert_array_equal, state, tx.init(params))
