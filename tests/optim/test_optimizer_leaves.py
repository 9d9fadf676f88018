"""The leaf table on a tree shaped like an NCP model: every parameter, its optimizer, axes, rate and decay."""

import jax
import jax.numpy as jnp
import pytest

from ncp_jax.config import ConfigError
from ncp_jax.optim.config import OptimConfig
from ncp_jax.optim.leaves import TRANSFORMER_RULES, LeafError, LeafRule, format_table, leaf_table

CONFIG = OptimConfig(muon_learning_rate=0.03, adam_learning_rate=0.05, muon_weight_decay=0.2, adam_weight_decay=0.1)


def tree(d=12, heads=3, kv=1, f=20, v=50, s=4, n=8, layers=2):
    """Abstract parameters of a routed NCP with 2/2/2 layers, grouped-query attention."""
    h = d // heads
    blocks = {
        "wq": (layers, d, heads, h), "wk": (layers, d, kv, h), "wv": (layers, d, kv, h), "wo": (layers, heads, h, d),
        "q_norm": (layers, heads, h), "k_norm": (layers, h), "attention_norm": (layers, d), "mlp_norm": (layers, d),
        "w_gate": (layers, d, f), "w_up": (layers, d, f), "w_down": (layers, f, d),
    }  # fmt: skip
    irc = {f"irc_{i}": {"static": (i + 2,), "w1": (d, i + 2), "w2": (i + 2, i + 2)} for i in range(layers)}

    def read(name, count):
        return {f"{name}_{i}": {"diagonal": (d,), "w1": (d, count), "w2": (count, count)} for i in range(layers)}

    norm = {"scale": (d,), "bias": (d,)}
    shapes = {
        "embed": {"table": (v, d)},
        "head": {"kernel": (d, v)},
        "encoder": {"blocks": blocks, **irc},
        "concept": {
            "blocks": blocks, **irc, "norm": norm, "final_norm": {"scale": (d,)},
            "heads": {"kernel": (s, d, n), "bias": (s, n)}, "codebook": {"codes": (s, n, d // s)},
            **read("read_encoder", 1), "read_encoder_norm": norm,
        },
        "decoder": {
            "blocks": blocks, **irc, "final_norm": {"scale": (d,)},
            **read("read_encoder", 2), **read("read_concept", 2), "read_encoder_norm": norm, "read_concept_norm": norm,
            **{f"reinject_{i}": {"norm_scale": (d,), "norm_bias": (d,), "diagonal": (d,)} for i in range(layers)},
            "fusion_token_norm": norm, "fusion_concept_norm": norm, "fusion_scale": (), "gate_logits": (layers, 2),
        },
    }  # fmt: skip
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def table(config=CONFIG):
    return {leaf.path: leaf for leaf in leaf_table(tree(), TRANSFORMER_RULES, config)}


MATRICES = {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"}


def test_every_leaf_once_in_tree_order():
    leaves = leaf_table(tree(), TRANSFORMER_RULES, CONFIG)
    assert len({leaf.path for leaf in leaves}) == len(leaves) == len(jax.tree.leaves(tree()))
    assert [leaf.shape for leaf in leaves] == [leaf.shape for leaf in jax.tree.leaves(tree())]


def test_muon_holds_hidden_kernels_and_nothing_else():
    expected = {f"{tower}/blocks/{w}" for tower in ("encoder", "concept", "decoder") for w in MATRICES}
    assert {path for path, leaf in table().items() if leaf.optimizer == "muon"} == expected | {"concept/heads/kernel"}
    assert {leaf.optimizer for leaf in table().values()} == {"muon", "adamw"}


@pytest.mark.parametrize(
    ("path", "role", "inside", "outside", "batch"),
    [
        ("encoder/blocks/wq", "query_key", (1,), (2, 3), (0,)),
        ("encoder/blocks/wk", "query_key", (1,), (2, 3), (0,)),
        ("decoder/blocks/wv", "value", (1,), (2, 3), (0,)),
        ("concept/blocks/wo", "attention_out", (1, 2), (3,), (0,)),
        ("encoder/blocks/w_down", "mlp", (1,), (2,), (0,)),
        ("concept/heads/kernel", "concept_head", (1,), (2,), (0,)),
    ],
)
def test_matrix_axes(path, role, inside, outside, batch):
    leaf = table()[path]
    assert (leaf.role, leaf.in_axes, leaf.out_axes, leaf.batch_axes) == (role, inside, outside, batch)
    assert (leaf.learning_rate, leaf.weight_decay) == (0.03, 0.2)


def test_per_head_takes_queries_and_keys_alone():
    leaves = table(OptimConfig(per_head_qk=True))
    for name in ("wq", "wk"):
        leaf = leaves[f"decoder/blocks/{name}"]
        assert (leaf.in_axes, leaf.out_axes, leaf.batch_axes) == ((1,), (3,), (0, 2))
    assert leaves["decoder/blocks/wv"].out_axes == (2, 3)


@pytest.mark.parametrize(
    ("path", "role", "decay"),
    [
        ("embed/table", "embedding", 0.0),
        ("head/kernel", "head", 0.1),
        ("concept/codebook/codes", "codebook", 0.1),
        ("concept/heads/bias", "bias", 0.0),
        ("encoder/irc_1/w1", "route_matrix", 0.1),
        ("encoder/irc_1/w2", "route_matrix", 0.1),
        ("encoder/irc_1/static", "route_vector", 0.0),
        ("decoder/read_concept_0/diagonal", "route_vector", 0.0),
        ("decoder/read_concept_0/w1", "route_matrix", 0.1),
        ("decoder/reinject_1/diagonal", "route_vector", 0.0),
        ("decoder/reinject_1/norm_scale", "norm", 0.0),
        ("decoder/gate_logits", "gate", 0.0),
        ("decoder/fusion_scale", "gate", 0.0),
        ("decoder/fusion_token_norm/bias", "norm", 0.0),
        ("concept/norm/scale", "norm", 0.0),
        ("concept/read_encoder_norm/scale", "norm", 0.0),
        ("decoder/final_norm/scale", "norm", 0.0),
        ("encoder/blocks/q_norm", "norm", 0.0),
        ("encoder/blocks/attention_norm", "norm", 0.0),
    ],
)
def test_adamw_roles_and_decay(path, role, decay):
    leaf = table()[path]
    assert (leaf.role, leaf.optimizer, leaf.learning_rate, leaf.weight_decay) == (role, "adamw", 0.05, decay)
    assert leaf.matrix is None


def test_decay_spares_every_vector_and_scalar():
    """By role, checked here by the shape of one layer: what decays has two axes or more beside the stacked ones."""
    for leaf in table().values():
        stacked = 1 if "/blocks/" in leaf.path or leaf.role == "gate" else 0
        if len(leaf.shape) - stacked < 2:
            assert leaf.weight_decay == 0, leaf.path


def test_adamw_takes_the_matrices_too():
    leaves = table(OptimConfig(optimizer="adamw", adam_learning_rate=0.05, adam_weight_decay=0.3))
    assert {leaf.optimizer for leaf in leaves.values()} == {"adamw"}
    leaf = leaves["encoder/blocks/wq"]
    assert (leaf.learning_rate, leaf.weight_decay, leaf.matrix) == (0.05, 0.3, None)
    assert leaves["embed/table"].weight_decay == 0


def test_unmatched_leaf_is_named():
    with pytest.raises(LeafError, match=r"encoder/mystery \[3, 4\]"):
        leaf_table({"encoder": {"mystery": jnp.zeros((3, 4))}}, TRANSFORMER_RULES, CONFIG)


def test_first_rule_wins_and_freezes():
    rules = (LeafRule(r"encoder/.*", "backbone", "frozen"), *TRANSFORMER_RULES)
    leaves = {leaf.path: leaf for leaf in leaf_table(tree(), rules, CONFIG)}
    assert leaves["encoder/blocks/wq"].optimizer == leaves["encoder/irc_0/w1"].optimizer == "frozen"
    assert leaves["encoder/blocks/wq"].weight_decay == leaves["encoder/blocks/wq"].learning_rate == 0
    assert leaves["decoder/blocks/wq"].optimizer == "muon"


def test_rules_that_cannot_work():
    with pytest.raises(ConfigError, match="without matrix axes"):
        LeafRule("w", "mlp", "muon")
    with pytest.raises(ConfigError, match="from the end"):
        LeafRule("w", "mlp", "muon", ((0,), (1,)))
    with pytest.raises(LeafError, match=r"wq .* has 2 axes"):
        leaf_table({"wq": jnp.zeros((3, 4))}, TRANSFORMER_RULES, CONFIG)


def test_table_as_text():
    leaves = leaf_table(tree(layers=2), TRANSFORMER_RULES, CONFIG)
    lines = [" ".join(line.split()) for line in format_table(leaves).splitlines()]
    assert lines[0].startswith("muon: 22 leaves")
    assert lines[0].endswith("peak learning rate 0.03")
    assert "encoder/blocks/wq 1 [2, 12, 3, 4] query_key 2 of (12 -> 3 x 4) 0.2" in lines
    assert "encoder/irc_*/w1 2 [12, 2..3] route_matrix 0.1" in lines
    sizes = [int(line.split(" leaves, ")[1].split()[0].replace(",", "")) for line in lines if " leaves, " in line]
    assert sum(sizes) == sum(leaf.size for leaf in leaves)
