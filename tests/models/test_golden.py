"""Our forward, losses and gradients against the official computations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import config_fields, load, ncp_config, ncp_params, olmo3, tensors

from ncp_jax.models.ncp.losses import nearest_codes, sums, weights
from ncp_jax.models.ncp.model import NCP
from ncp_jax.models.olmo3 import Olmo3

TOLERANCE = 5e-4
FULL_FILES = ["ncp_raw_full", "ncp_softmax_full", "ncp_raw_perhead", "ncp_softmax_perhead"]


@pytest.fixture(scope="module", params=FULL_FILES)
def golden(request):
    return load(request.param)


def close(ours, theirs, what):
    """Within 5e-4 of the tensor's scale: signed routes grow some states to 1e3, where a float32 ulp is 1e-4."""
    scale = max(1.0, float(np.sqrt(np.mean(np.square(theirs)))))
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=TOLERANCE * scale, rtol=0, err_msg=what)


def computed(golden, length) -> tuple[dict, dict, np.ndarray]:
    """(intermediates under the golden's names, loss terms, code ids), in one executable."""
    c = ncp_config(config_fields(golden))
    dtype = jnp.result_type(float)
    params = jax.tree.map(lambda a: jnp.asarray(a, dtype), ncp_params(tensors(golden).__getitem__, c))
    model = NCP(c, dtype)

    @jax.jit
    def run(params, ids):
        hidden, state = model.apply({"params": params}, ids, mutable="intermediates")
        seen = state["intermediates"]
        states = {
            "enc_raw": jnp.stack(seen["encoder_raw"][0]),
            "enc_hidden": seen["encoder_hidden"][0],
            "pooled": seen["pooled"][0],
            "concept_in": hidden.concepts_BMD,
            "hlm_raw": jnp.stack(seen["concept_raw"][0]),
            "hlm_routed_last": seen["concept"]["routed"][0],
            "hlm_final": seen["concept"]["final"][0],
            "concept_logits": hidden.logits_BMSN,
            "concept_pred": hidden.predicted_BMD,
            "injected": seen["injected"][0],
            "fusion": seen["decoder"]["fused"][0],
            "dec_raw": jnp.stack(seen["decoder"]["raw"][0]),
            "dec_routed": jnp.stack(seen["decoder"]["routed"]),
            "final": hidden.out_BTD,
            "logits": hidden.out_BTD @ params["head"]["kernel"],
        }
        return states, *loss_terms(c, hidden, params, ids)

    return run(params, golden[f"{length}/ids"])


@pytest.mark.parametrize("length", ["T32", "T30"])
def test_float32(golden, length):
    states, losses, codes = computed(golden, length)
    for name, value in states.items():
        close(value, golden[f"{length}/{name}"], name)
    check_losses(golden, length, losses, codes)


def test_float64(golden):
    with jax.enable_x64(True):
        states, losses, codes = computed(golden, "T32")
        for name, value in states.items():
            assert value.dtype == jnp.float64, name
            np.testing.assert_allclose(value, golden[f"T32/{name}"], rtol=1e-6, atol=1e-6, err_msg=name)
        check_losses(golden, "T32", losses, codes)


def check_losses(golden, length, losses, codes):
    np.testing.assert_array_equal(codes, golden[f"{length}/code_ids"])
    for term, name in {"ntp": "loss_ntp", "ncp": "loss_hlm", "vq": "loss_vq"}.items():
        np.testing.assert_allclose(losses[term], golden[f"{length}/{name}"], rtol=1e-5, err_msg=term)


@pytest.mark.parametrize("name", ["ncp_raw_full", "ncp_softmax_full"])
def test_gradient_routes(name):
    golden = load(name)
    c, ids = ncp_config(config_fields(golden)), golden["T32/ids"]

    def terms(named):
        params = ncp_params(named.__getitem__, c)
        losses, _ = loss_terms(c, NCP(c).apply({"params": params}, ids), params, ids)
        return jnp.stack([losses["ntp"], losses["ncp"], losses["vq"]])

    rows = jax.jit(jax.jacrev(terms))(tensors(golden))
    for row, key in enumerate(("ntp", "hlm", "vq")):
        for tensor, theirs in zip(golden["grad_names"], golden[f"grad_norm_{key}"], strict=True):
            ours = float(jnp.linalg.norm(rows[str(tensor)][row]))
            assert ours == pytest.approx(float(theirs), rel=1e-3, abs=1e-7), (key, tensor)
        for full in (n for n in golden.files if n.startswith(f"grad_{key}/")):
            ours = rows[full.removeprefix(f"grad_{key}/")][row]
            np.testing.assert_allclose(ours, golden[full], atol=1e-3 * np.abs(golden[full]).max() + 1e-8, err_msg=full)
    moved_by_vq = {name for name, gradient in rows.items() if jnp.abs(gradient[2]).max() > 0}
    assert moved_by_vq == {f"model.concept_quantizer.codebook.{s}" for s in range(c.concept.segments)}


VARIANTS = {
    "logits": {},
    "logits_token_window_exclusive": {"exclusive": True},
    "logits_no_shift": {"shift": False},
    "logits_hard_top1": {"mix": "hard"},
    "logits_hlm_full_attention": {"window": None},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", ["T50", "T3", "T4", "T7"])
def test_window_edges_and_variants(variant, length):
    golden = load("ncp_window_edges")
    c = ncp_config(config_fields(golden))
    change = dict(VARIANTS[variant])
    if change.pop("exclusive", False):
        c = dataclasses.replace(c, backbone=dataclasses.replace(c.backbone, window=c.backbone.window - 1))
    c = dataclasses.replace(c, concept=dataclasses.replace(c.concept, **change))
    params, ids = ncp_params(tensors(golden).__getitem__, c), golden[f"{length}/ids"]
    hidden = jax.jit(lambda p, i: NCP(c).apply({"params": p}, i))(params, ids)
    gap = jnp.diff(jnp.sort(hidden.logits_BMSN, axis=-1)[..., -2:])
    assert change.get("mix") != "hard" or gap.min() > 1e-6  # else the top code is a tie
    close(hidden.out_BTD @ params["head"]["kernel"], golden[f"{length}/{variant}"], variant)


def test_native_names():
    golden = load("ncp_native_names")
    c = ncp_config(config_fields(golden))
    params = ncp_params(tensors(golden).__getitem__, c, "native")
    forward = jax.jit(lambda p, i: NCP(c).apply({"params": p}, i, method="logits"))
    close(forward(params, golden["T32/ids"]), golden["T32/logits"], "native")


@pytest.mark.parametrize("scan", [True, False])
def test_olmo3(scan):
    golden = load("olmo3_tiny")
    config, params = olmo3(golden)
    config = dataclasses.replace(config, scan=scan)
    forward = jax.jit(lambda p, i: Olmo3(config).apply({"params": p}, i, method="logits"))
    close(forward(params, golden["ids"]), golden["logits"], "olmo3")


def loss_terms(c, hidden, params, ids):
    """(mean of each term, code ids). The files average over T - 1 targets."""
    targets = jnp.concatenate([ids[:, 1:], jnp.zeros_like(ids[:, :1])], axis=1)
    scored = jnp.ones_like(ids, bool).at[:, -1].set(False)
    total, weight = sums(c, hidden, params, targets, scored), weights(c, scored, jnp.ones_like(ids))
    codes = nearest_codes(c, hidden.concepts_BMD, params["concept"]["codebook"]["codes"])
    return {term: total[term] / weight[term] for term in total}, codes
