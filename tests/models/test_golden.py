"""Our forward, losses and gradients against the official computations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import config_fields, load, native_get, ncp_config, ncp_params, olmo3

from ncp_jax.models.ncp.losses import nearest_codes, sums, weights
from ncp_jax.models.ncp.model import NCP
from ncp_jax.models.olmo3 import Olmo3


TOLERANCE = 5e-4
FULL_FILES = ["ncp_raw_full", "ncp_softmax_full", "ncp_raw_perhead", "ncp_softmax_perhead"]


@pytest.fixture(scope="module", params=FULL_FILES)
def golden(request):
    return load(request.param)


def tensors(golden) -> dict:
    return {name[2:]: golden[name] for name in golden.files if name.startswith("w/")}


def close(ours, theirs, what):
    """Within 5e-4 of the tensor's scale: signed routes grow some states to 1e3, where a float32 ulp is 1e-4."""
    scale = max(1.0, float(np.sqrt(np.mean(np.square(theirs)))))
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=TOLERANCE * scale, rtol=0, err_msg=what)


def intermediates(golden, length) -> dict:
    c = ncp_config(config_fields(golden))
    dtype = jnp.result_type(float)
    params = jax.tree.map(lambda a: jnp.asarray(a, dtype), ncp_params(tensors(golden).__getitem__, c))
    model = NCP(c, dtype)

    @jax.jit
    def run(params, ids):
        hidden, state = model.apply({"params": params}, ids, mutable="intermediates")
        return hidden, state["intermediates"], hidden.out_BTD @ params["head"]["kernel"]

    hidden, seen, logits = run(params, golden[f"{length}/ids"])
    return {
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
        "logits": logits,
    }


@pytest.mark.parametrize("length", ["T32", "T30"])
def test_every_intermediate_in_float32(golden, length):
    for name, value in intermediates(golden, length).items():
        close(value, golden[f"{length}/{name}"], name)


@pytest.mark.parametrize("length", ["T32", "T30"])
def test_every_intermediate_in_float64(golden, length):
    with jax.enable_x64(True):
        for name, value in intermediates(golden, length).items():
            assert value.dtype == jnp.float64, name
            np.testing.assert_allclose(value, golden[f"{length}/{name}"], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("length", ["T32", "T30"])
def test_codes_and_losses(golden, length):
    c = ncp_config(config_fields(golden))
    ids = golden[f"{length}/ids"]
    losses, codes = loss_terms(c, tensors(golden), ids)
    np.testing.assert_array_equal(codes, golden[f"{length}/code_ids"])
    for term, name in {"ntp": "loss_ntp", "ncp": "loss_hlm", "vq": "loss_vq"}.items():
        np.testing.assert_allclose(losses[term], golden[f"{length}/{name}"], rtol=1e-5, err_msg=term)


@pytest.mark.parametrize("name", ["ncp_raw_full", "ncp_softmax_full"])
@pytest.mark.parametrize("term,key", [("ntp", "ntp"), ("ncp", "hlm"), ("vq", "vq")])
def test_gradient_routes(name, term, key):
    golden = load(name)
    c, ids = ncp_config(config_fields(golden)), golden["T32/ids"]
    gradient = jax.grad(lambda w: loss_terms(c, w, ids)[0][term])(tensors(golden))
    names, norms = golden["grad_names"], golden[f"grad_norm_{key}"]
    for tensor, theirs in zip(names, norms, strict=True):
        ours = float(jnp.linalg.norm(gradient[str(tensor)]))
        assert ours == pytest.approx(float(theirs), rel=1e-3, abs=1e-7), tensor
    for full in (n for n in golden.files if n.startswith(f"grad_{key}/")):
        ours = gradient[full.removeprefix(f"grad_{key}/")]
        np.testing.assert_allclose(ours, golden[full], atol=1e-3 * np.abs(golden[full]).max() + 1e-8, err_msg=full)
    if term == "vq":
        moved = {name for name, g in gradient.items() if jnp.abs(g).max() > 0}
        assert moved == {f"model.concept_quantizer.codebook.{s}" for s in range(c.concept.segments)}


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
    hidden = NCP(c).apply({"params": params}, ids)
    gap = jnp.diff(jnp.sort(hidden.logits_BMSN, axis=-1)[..., -2:])
    assert change.get("mix") != "hard" or gap.min() > 1e-6  # else the top code is a tie
    close(NCP(c).apply({"params": params}, ids, method="logits"), golden[f"{length}/{variant}"], variant)


def test_native_names():
    golden = load("ncp_native_names")
    c = ncp_config(config_fields(golden))
    params = ncp_params(native_get(tensors(golden), c), c)
    close(NCP(c).apply({"params": params}, golden["T32/ids"], method="logits"), golden["T32/logits"], "native")


@pytest.mark.parametrize("scan", [True, False])
def test_olmo3(scan):
    golden = load("olmo3_tiny")
    config, params = olmo3(golden)
    config = dataclasses.replace(config, scan=scan)
    close(Olmo3(config).apply({"params": params}, golden["ids"], method="logits"), golden["logits"], "olmo3")


def loss_terms(c, tensors, ids):
    params = ncp_params(tensors.__getitem__, c)
    targets = jnp.concatenate([ids[:, 1:], jnp.zeros_like(ids[:, :1])], axis=1)
    scored = jnp.ones_like(ids, bool).at[:, -1].set(False)  # the files average over T - 1 targets
    hidden = NCP(c).apply({"params": params}, ids)
    total, weight = sums(c, hidden, params, targets, scored), weights(c, scored, jnp.ones_like(ids))
    codes = nearest_codes(c, hidden.concepts_BMD, params["concept"]["codebook"]["codes"])
    return {term: total[term] / weight[term] for term in total}, codes
