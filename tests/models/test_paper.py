"""The `paper` preset against its NumPy reference, in float64: every state, every loss, every leaf's gradient.

Nothing here is jitted: the settings share their shapes, so op by op they share one set of compiled kernels.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paper_parameters import directional_derivative, random_parameters, tree_map
from paper_reference import Sizes, forward, losses

from ncp_jax.models.ncp.config import NCPConfig, paper
from ncp_jax.models.ncp.losses import coefficients, sums, weights
from ncp_jax.models.ncp.model import NCP
from ncp_jax.nn.backbone import Backbone

BASE = Sizes(
    vocab=13, width=8, heads=4, ffn=12, encoder_layers=3, concept_layers=2, decoder_layers=2, chunk=4, segments=2,
    codes=3, kv_heads=2, window=3, concept_window=2, full_every=2, rope_theta=100.0,
)  # fmt: skip
SETTINGS = {
    "paper": {},
    "softmax_routes": {"irc_encoder": "softmax", "irc_concept": "softmax", "irc_decoder": "softmax"},
    "router_reads_output": {"irc_input": "output"},
    "raw_logits": {"mix": "raw_logits", "kv_heads": None},
    "hard": {"mix": "hard", "qk_norm": "per_head"},
    "mixed_routes": {"irc_concept": "none", "irc_decoder": "softmax", "irc_input": "output", "window": None},
}
TOKENS = np.random.default_rng(7).integers(0, BASE.vocab, size=(2, 14))  # three chunks and a tail of two
TERMS = ("ntp", "ncp", "vq", "code_ce")


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_state(setting):
    assert_same_states(dataclasses.replace(BASE, **SETTINGS[setting]), TOKENS)


@pytest.mark.parametrize("paths", itertools.product([False, True], repeat=3))
def test_every_subset_of_cross_routes(paths):
    names = ("concept_from_encoder", "decoder_from_encoder", "decoder_from_concept")
    assert_same_states(dataclasses.replace(BASE, **dict(zip(names, paths, strict=True))), TOKENS)


@pytest.mark.parametrize("length", [3, 4, 7])
def test_every_kind_of_length(length):
    assert_same_states(BASE, TOKENS[:, :length])


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradient_of_every_leaf(setting):
    """Each term's gradient along a random direction of one leaf at a time; where the report detaches, it is zero."""
    sizes = dataclasses.replace(BASE, **SETTINGS[setting])
    params = random_parameters(np.random.default_rng(0), sizes)
    config = config_of(sizes)
    with jax.enable_x64(True):
        gradients = gradient_of_each_term(config, params)
    frozen = [forward(params, row, sizes).concepts_MD for row in TOKENS]

    def reference(p):
        rows = [losses(p, row, row[1:], sizes, kept) for row, kept in zip(TOKENS, frozen, strict=True)]
        return np.mean([[row[name] for name in TERMS] for row in rows], axis=0)

    rng = np.random.default_rng(1)
    for path, leaf in leaves(params):
        along = rng.normal(size=leaf.shape)
        theirs = directional_derivative(reference, params, only(params, path, along), step=3e-7)
        ours = [(at(gradients[name], path) * along).sum() for name in TERMS]
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=3e-8, err_msg="/".join(path))
        assert path == ("concept", "codebook", "codes") or theirs[TERMS.index("vq")] == 0, path


@pytest.mark.parametrize("ncp_reduction", ["sum", "per_segment", "mean"])
@pytest.mark.parametrize("vq_reduction", ["sum", "mean"])
@pytest.mark.parametrize("weighting", ["mean", "per_token"])
def test_reductions_and_total(ncp_reduction, vq_reduction, weighting):
    params = random_parameters(np.random.default_rng(0), BASE)
    config = _with_loss(
        config_of(BASE), ncp_reduction=ncp_reduction, vq_reduction=vq_reduction, aux_weighting=weighting,
        ncp_weight=0.3, vq_weight=0.7,
    )  # fmt: skip
    with jax.enable_x64(True):
        ours = {name: float(value) for name, value in terms(config, params, TOKENS).items()}
    aux = 1 / TOKENS.shape[1] if weighting == "per_token" else 1.0
    rows = [
        losses(
            params, row, row[1:], BASE, forward(params, row, BASE).concepts_MD, ncp_reduction=ncp_reduction,
            vq_reduction=vq_reduction, alpha=0.3 * aux, beta=0.7 * aux,
        )
        for row in TOKENS
    ]  # fmt: skip
    theirs = {name: np.mean([row[name] for row in rows]) for name in rows[0]}
    for name in TERMS:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-9), name
    weight = coefficients(config, TOKENS.shape[1])
    assert sum(weight[name] * ours[name] for name in weight) == pytest.approx(theirs["total"], rel=1e-9)


def test_preset_weighs_summed_losses_as_element_means():
    """alpha = 1/D and beta = S/D (an assumption) turn the sums of Eq. 21-22 into means over all elements."""
    params = random_parameters(np.random.default_rng(0), BASE)
    config = config_of(BASE)
    with jax.enable_x64(True):
        ours = {name: float(value) for name, value in terms(config, params, TOKENS).items()}
    means = {"ncp_reduction": "mean", "vq_reduction": "mean"}
    rows = [losses(params, row, row[1:], BASE, forward(params, row, BASE).concepts_MD, **means) for row in TOKENS]
    theirs, weight = np.mean([row["total"] for row in rows]), coefficients(config, TOKENS.shape[1])
    assert sum(weight[name] * ours[name] for name in weight) == pytest.approx(theirs, rel=1e-9)


def assert_same_states(sizes: Sizes, tokens_BT: np.ndarray):
    params, config = random_parameters(np.random.default_rng(0), sizes), config_of(sizes)
    with jax.enable_x64(True):
        model = NCP(config, jnp.float64)
        shapes = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)["params"]
        assert tree_map(np.shape, params) == jax.tree.map(lambda a: a.shape, _unboxed(shapes))
        hidden, state = model.apply({"params": params}, tokens_BT, mutable="intermediates")
        logits = hidden.out_BTD @ params["head"]["kernel"]
    seen = state["intermediates"]
    for row, tokens_T in enumerate(tokens_BT):
        theirs = forward(params, tokens_T, sizes)
        count = len(theirs.concepts_MD)
        pairs = [
            ("encoder outputs", np.stack(seen["encoder_raw"][0])[:, row], theirs.encoder.outputs),
            ("encoder state", seen["encoder_hidden"][0][row], theirs.encoder.states[-1]),
            ("concepts", hidden.concepts_BMD[row, :count], theirs.concepts_MD),
            ("concept outputs", np.stack(seen["concept_raw"][0])[:, row, :count], theirs.concept.outputs),
            ("head logits", hidden.logits_BMSN[row, :count], theirs.head_logits_MSN),
            ("predictions", hidden.predicted_BMD[row, :count], theirs.predicted_MD),
            ("injected", seen["injected"][0][row], theirs.injected_TD),
            ("decoder outputs", np.stack(seen["decoder"]["raw"][0])[:, row], theirs.decoder.outputs),
            ("decoder states", np.stack(seen["decoder"]["routed"])[:, row], theirs.decoder.states),
            ("logits", logits[row], theirs.logits_TV),
        ]
        for name, ours, expected in pairs:
            assert ours.dtype == np.float64, name
            np.testing.assert_allclose(ours, np.asarray(expected), rtol=1e-9, atol=1e-9, err_msg=name)


def config_of(sizes: Sizes) -> NCPConfig:
    """The preset at these sizes, then the switches that differ from it."""
    backbone = Backbone(
        width=sizes.width, heads=sizes.heads, ffn=sizes.ffn, kv_heads=sizes.kv_heads, qk_norm=sizes.qk_norm,
        window=sizes.window, full_every=sizes.full_every, rope_theta=sizes.rope_theta, eps=sizes.eps,
    )  # fmt: skip
    config = paper(
        backbone=backbone, segments=sizes.segments, codes=sizes.codes, vocab=sizes.vocab,
        encoder_layers=sizes.encoder_layers, concept_layers=sizes.concept_layers, decoder_layers=sizes.decoder_layers,
    )  # fmt: skip
    concept = dataclasses.replace(config.concept, chunk=sizes.chunk, mix=sizes.mix, window=sizes.concept_window)
    same = ("irc_encoder", "irc_concept", "irc_decoder", "irc_input",
            "concept_from_encoder", "decoder_from_encoder", "decoder_from_concept")  # fmt: skip
    routing = dataclasses.replace(config.routing, **{name: getattr(sizes, name) for name in same})
    return dataclasses.replace(config, concept=concept, routing=routing)


def terms(config: NCPConfig, params, tokens_BT) -> dict:
    """Each loss as the training step forms it: sum over weight."""
    targets_BT = np.roll(tokens_BT, -1, axis=1)
    scored_BT = np.ones(tokens_BT.shape, bool)
    scored_BT[:, -1] = False  # Eq. 23 has T - 1 targets
    hidden = NCP(config, jnp.float64).apply({"params": params}, tokens_BT)
    values = {}
    for objective, name in (("code_ce", "code_ce"), ("mse", "ncp")):
        chosen = _with_loss(config, concept_objective=objective)
        total = sums(chosen, hidden, params, targets_BT, scored_BT)
        weight = weights(chosen, scored_BT, np.ones_like(tokens_BT))
        values |= {term: total[term] / weight[term] for term in total}
        values[name] = values["ncp"]
    return values


def gradient_of_each_term(config: NCPConfig, params) -> dict:
    values, pull_back = jax.vjp(lambda p: terms(config, p, TOKENS), jax.tree.map(jnp.asarray, params))
    one_hot = {name: {other: jnp.ones_like(v) * (other == name) for other, v in values.items()} for name in values}
    return {name: jax.tree.map(np.asarray, pull_back(chosen)[0]) for name, chosen in one_hot.items()}


def leaves(tree, path=()):
    if not isinstance(tree, dict):
        return [(path, tree)]
    return [item for key in tree for item in leaves(tree[key], (*path, key))]


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def only(params, path, along):
    """A direction that moves one leaf."""
    direction = tree_map(np.zeros_like, params)
    at(direction, path[:-1])[path[-1]] = along
    return direction


def _with_loss(config: NCPConfig, **change) -> NCPConfig:
    return dataclasses.replace(config, loss=dataclasses.replace(config.loss, **change))


def _unboxed(tree):
    return jax.tree.map(lambda box: box.value, tree, is_leaf=lambda x: hasattr(x, "value"))
