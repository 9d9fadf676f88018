"""The energy objective of the concept heads: a twin in NumPy, propriety, gradients, masks, cost, errors, export."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_tests import BACKBONE, SIZES, VOCAB, K, presets, random_params

from ncp_jax.config import ConfigError, load, override
from ncp_jax.convert.formats import SpecialIds, read_config, write_config
from ncp_jax.models import flops
from ncp_jax.models.ncp.config import Concept, Loss, NCPConfig, Routing
from ncp_jax.models.ncp.losses import concept_energy, sums, weights
from ncp_jax.models.ncp.model import NCP, Hidden

S, N, W = 4, 6, 4
D = S * W
# Two documents and padding, as concepts; then no concept at all.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0]], np.int32)
PAIRED = np.array([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
B, M = SEGMENTS.shape
BETAS = (0.5, 1.0, 1.5)


def energy_config(preset: str = "released", **loss) -> NCPConfig:
    config = presets()[preset]
    return dataclasses.replace(config, loss=dataclasses.replace(config.loss, concept_objective="energy", **loss))


def twin(logits_BMSN, concepts_BMD, codes_SNW, paired_BP, beta) -> float:
    """The term's sum, one pair and segment at a time, with every pair of codes."""
    total = 0.0
    for b, m in np.argwhere(paired_BP):
        for z_N, codes_NW, c_W in zip(logits_BMSN[b, m], codes_SNW, concepts_BMD[b, m + 1].reshape(S, W), strict=True):
            p_N = np.exp(z_N - z_N.max()) / np.exp(z_N - z_N.max()).sum()
            gap_N = np.linalg.norm(codes_NW - c_W, axis=-1) ** beta
            gap_NN = np.linalg.norm(codes_NW[:, None] - codes_NW, axis=-1) ** beta
            total += 2 * p_N @ gap_N - p_N @ gap_NN @ p_N
    return total


@pytest.fixture(scope="module")
def arrays():
    """(logits, concepts, codes) in float64."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(B, M, S, N)), rng.normal(size=(B, M, D)), rng.normal(size=(S, N, W))


def term(config: NCPConfig, logits, concepts, codes, segments=SEGMENTS):
    """The concept term's sum by the losses that training calls."""
    params = {"head": {"kernel": jnp.zeros((D, 3))}, "concept": {"codebook": {"codes": codes}}}
    tokens = np.zeros((B, M * K), np.int32)
    hidden = Hidden(jnp.zeros((B, M * K, D)), concepts, jnp.asarray(segments), jnp.zeros((B, M, D)), logits)
    return sums(config, hidden, params, tokens, tokens > 0)["ncp"]


@partial(jax.jit, static_argnums=0)
def term_and_gradients(config: NCPConfig, *arrays):
    """The same, and its gradients by logits, concepts and codes."""
    return jax.value_and_grad(lambda *a: term(config, *a), argnums=(0, 1, 2))(*arrays)


@pytest.mark.parametrize("beta", [*BETAS, 2.0])
def test_values_and_gradients_of_the_twin(arrays, beta):
    config = energy_config(energy_beta=beta, energy_trains_codes=True)
    with jax.enable_x64(True):
        value, gradients = term_and_gradients(config, *arrays)
        assert value.dtype == np.float64
    assert float(value) == pytest.approx(twin(*arrays, PAIRED, beta), rel=1e-9)
    rng, step = np.random.default_rng(1), 1e-6
    for place in (0, 2):
        along = rng.normal(size=arrays[place].shape)
        moved = [list(arrays), list(arrays)]
        for sign, these in zip((1, -1), moved, strict=True):
            these[place] = these[place] + sign * step * along
        slope = (twin(*moved[0], PAIRED, beta) - twin(*moved[1], PAIRED, beta)) / (2 * step)
        assert (np.asarray(gradients[place]) * along).sum() == pytest.approx(slope, rel=1e-6)
    np.testing.assert_array_equal(gradients[1], 0)  # the target


def test_through_the_model():
    """pi is the softmax of the logits where the mix is raw; heads and history learn, codes if they are told to."""
    routing = Routing(concept_from_encoder=False)
    config = dataclasses.replace(presets()["released"], encoder_layers=1, concept_layers=1, routing=routing)
    tokens = np.random.default_rng(2).integers(0, VOCAB, size=(2, 4 * K))
    everywhere = np.ones_like(tokens)
    with jax.enable_x64(True):
        model = NCP(config, jnp.float64)
        params = random_params(model)

        def means(params):
            """The mean term, with codes detached and with codes trained."""
            hidden, found = model.apply({"params": params}, tokens, everywhere), []
            for trained in (False, True):
                c = energy_config(energy_trains_codes=trained)
                total = sums(c, hidden, params, tokens, everywhere > 0)["ncp"]
                found.append(total / weights(c, everywhere > 0, everywhere)["ncp"])
            return jnp.stack(found), (found, hidden.logits_BMSN, hidden.concepts_BMD)

        gradient, (values, logits, concepts) = jax.jit(jax.jacrev(means, has_aux=True))(params)
        codes = params["concept"]["codebook"]["codes"]
    expected = twin(*map(np.asarray, (logits, concepts, codes)), np.ones((2, 3), bool), 1.0) / (2 * 3 * S)
    np.testing.assert_allclose(values, expected, rtol=1e-9)
    concept = gradient["concept"]
    for leaf in (concept["heads"]["kernel"], concept["heads"]["bias"], gradient["embed"]["table"]):
        assert np.abs(leaf[0]).max() > 1e-6
        np.testing.assert_array_equal(leaf[0], leaf[1])
    np.testing.assert_array_equal(concept["codebook"]["codes"][0], 0)
    assert np.abs(concept["codebook"]["codes"][1]).max() > 1e-6
    np.testing.assert_array_equal(gradient["decoder"]["final_norm"]["scale"], 0)


@pytest.fixture(scope="module")
def laws():
    """One random law over random codes for each segment, (q [S, N], codes [S, N, W]); N = W + 2."""
    rng = np.random.default_rng(3)
    return rng.dirichlet(np.full(N, 5.0), size=S), rng.normal(size=(S, N, W))


@partial(jax.jit, static_argnums=0)
def expected_energy(beta: float, laws, p_SN):
    """Mean energy [S] where the next segment is code n with probability q_n, and the head says p."""
    q_SN, codes_SNW = laws
    # Row n of N: the next concept is code n in every segment.
    concepts = jnp.zeros((N, 2, D)).at[:, 1].set(codes_SNW.swapaxes(0, 1).reshape(N, D))
    logits = jnp.broadcast_to(jnp.log(p_SN), (N, 2, S, N))
    hidden = Hidden(None, concepts, None, None, logits)
    return (q_SN.T * concept_energy(energy_config(energy_beta=beta), hidden, codes_SNW)[:, 0]).sum(axis=0)


def pair_distances(codes_SNW, beta):
    return np.linalg.norm(codes_SNW[:, :, None] - codes_SNW[:, None], axis=-1) ** beta


@pytest.mark.parametrize("beta", BETAS)
def test_the_law_itself_is_the_only_minimum(laws, beta):
    """E(p) - E(q) = -(p - q) P (p - q), which is above 0 for distinct codes and p != q: strictly proper."""
    q_SN, codes_SNW = laws
    others = np.random.default_rng(4).dirichlet(np.ones(N), size=(20, S))
    others = np.concatenate([others, 0.98 * q_SN + 0.02 * others])
    with jax.enable_x64(True):
        slope = jax.jit(jax.grad(lambda z: expected_energy(beta, laws, jax.nn.softmax(z)).sum()))(np.log(q_SN))
        at_law = np.asarray(expected_energy(beta, laws, q_SN))
        elsewhere = np.stack([expected_energy(beta, laws, p_SN) for p_SN in others])
    np.testing.assert_allclose(slope, 0, atol=1e-12)
    assert (elsewhere > at_law).all()
    gap = others - q_SN
    theory = -np.einsum("isn,snk,isk->is", gap, pair_distances(codes_SNW, beta), gap)
    np.testing.assert_allclose(elsewhere - at_law, theory, rtol=1e-9, atol=1e-12)


def test_two_knows_means_alone(laws):
    """beta = 2: E(p) - E(q) = 2 |mean of p - mean of q|^2, so laws with the true mean all score alike."""
    q_SN, codes_SNW = laws
    # N = W + 2: one direction per segment changes neither mass nor mean.
    still = np.stack([np.linalg.svd(np.vstack([e_NW.T, np.ones(N)]))[2][-1] for e_NW in codes_SNW])
    same_mean = q_SN + 0.9 * np.min(q_SN / np.abs(still), axis=-1, keepdims=True) * still
    other = np.random.default_rng(5).dirichlet(np.ones(N), size=S)
    with jax.enable_x64(True):
        at_law, at_same, at_other = (np.asarray(expected_energy(2.0, laws, p)) for p in (q_SN, same_mean, other))
        proper = np.asarray(expected_energy(1.0, laws, same_mean) - expected_energy(1.0, laws, q_SN))
    assert np.abs(same_mean - q_SN).max(axis=-1).min() > 0.01
    np.testing.assert_allclose(at_same, at_law, rtol=1e-12)
    shift = np.einsum("sn,snw->sw", other - q_SN, codes_SNW)
    np.testing.assert_allclose(at_other - at_law, 2 * (shift**2).sum(axis=-1), rtol=1e-9)
    assert (proper > 1e-6).all()


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_coinciding_codes_and_a_target_that_is_a_code(arrays, beta):
    """In float32: zero distances have zero gradients, between codes and to the target."""
    logits, concepts, codes = (a.astype(np.float32) for a in arrays)
    codes[:, 1] = codes[:, 0]
    concepts[:, 1:] = codes[:, 0].reshape(-1)
    config = energy_config(energy_beta=beta, energy_trains_codes=True)
    value, gradients = term_and_gradients(config, logits, concepts, codes)
    assert all(np.isfinite(a).all() for a in (value, *gradients))
    assert float(value) == pytest.approx(twin(logits, concepts, codes, PAIRED, beta), rel=1e-5)
    # A head that is sure of the code that comes has nothing to lose, and nothing to gain.
    sure = np.full_like(logits, -40.0)
    sure[..., 0] = 40.0
    value, gradients = term_and_gradients(config, sure, concepts, codes)
    assert float(value) == 0
    np.testing.assert_array_equal(gradients[0], 0)


def test_padding_and_other_documents_contribute_nothing(arrays):
    logits, concepts, codes = arrays
    config = energy_config()
    counted = np.pad(PAIRED, ((0, 0), (0, 1)))
    targets = np.pad(PAIRED, ((0, 0), (1, 0)))
    noisy = logits + 9.0 * ~counted[:, :, None, None], np.where(targets[:, :, None], concepts, 1e3)
    value, gradients = term_and_gradients(config, logits, concepts, codes)
    assert float(term_and_gradients(config, *noisy, codes)[0]) == float(value)
    moved = np.asarray(gradients[0]) != 0
    np.testing.assert_array_equal(moved.all(axis=(2, 3)), counted)
    np.testing.assert_array_equal(moved.any(axis=(2, 3)), counted)


def test_a_batch_without_pairs_is_worth_nothing(arrays):
    """Documents of one concept, and a row of one concept."""
    lonely, short = np.arange(1, M + 1, dtype=np.int32)[None].repeat(B, 0), [a[:, :1] for a in arrays[:2]]
    value, gradients = jax.jit(jax.value_and_grad(lambda z: term(energy_config(), z, *arrays[1:], lonely)))(arrays[0])
    assert float(value) == 0
    np.testing.assert_array_equal(gradients, 0)
    assert float(jax.jit(lambda: term(energy_config(), *short, arrays[2], SEGMENTS[:, :1]))()) == 0


def test_weight_is_pairs_times_segments():
    segments_BT = np.repeat(SEGMENTS, K, axis=1)
    for how in ("mean", "sum"):  # of mse alone
        assert weights(energy_config(ncp_reduction=how), segments_BT > 0, segments_BT)["ncp"] == PAIRED.sum() * S


BIG = {"B": 2, "M": 17, "S": 2, "N": 64, "W": 64}


def compiled_gradient():
    """(jaxpr, compiled) of value and gradients with trained codes, where N^2 and N W per position would show."""
    B, M, S, N, W = BIG.values()
    backbone = dataclasses.replace(BACKBONE, width=S * W)
    loss = Loss(concept_objective="energy", energy_trains_codes=True)
    config = NCPConfig(backbone=backbone, concept=Concept(segments=S, codes=N), loss=loss, **SIZES)

    def total(logits, codes, concepts):
        return concept_energy(config, Hidden(None, concepts, None, None, logits), codes).sum()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((B, M, S, N), (S, N, W), (B, M, S * W))]
    traced = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).trace(*shapes)
    return traced.jaxpr, traced.lower().compile()


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_cost_of_a_position():
    """Distances between codes are made once per segment; nothing the size of N^2 or N W per position is kept."""
    jaxpr, compiled = compiled_gradient()
    B, M, S, N, W = BIG.values()
    found = list(equations(jaxpr.jaxpr))
    sizes = [variable.aval.size for equation in found for variable in equation.outvars]
    assert max(sizes) <= max(B * M * S * N * W, S * N * N * W)
    products = [equation for equation in found if equation.primitive.name == "dot_general"]
    assert len(products) >= 5
    assert all(set(product.params["precision"]) == {jax.lax.Precision.HIGHEST} for product in products)
    assert compiled.memory_analysis().temp_size_in_bytes < 0.25 * 4 * B * (M - 1) * S * N * W


@pytest.mark.parametrize(("trained", "products"), [(False, 2), (True, 3)])
def test_flops_count_the_products(trained, products):
    energy = energy_config(energy_trains_codes=trained)
    extra = (flops.training_flops_by_part(c, 5 * K + 1)["prediction"] for c in (energy, presets()["released"]))
    assert next(extra) - next(extra) == pytest.approx(products * 2 * S * N * N * 5 / (5 * K + 1))


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("model.loss.energy_beta=0", r"model.loss.energy_beta: .*beta is 0.0; it must lie in \(0, 2\]"),
        ("model.loss.energy_beta=2.5", r"model.loss.energy_beta: .*beta is 2.5; it must lie in \(0, 2\]"),
        ("model.loss.concept_objective=enrgy", "model.loss.concept_objective.*'energy'.*'enrgy'"),
        ("model.loss.energy_bta=1", "did you mean 'model.loss.energy_beta'"),
    ],
)
def test_config_errors(pair, message):
    with pytest.raises(ConfigError, match=message):
        override(load("configs/ncp_nano_energy.py"), [pair])


@pytest.mark.parametrize("objective", ["mse", "code_ce", "energy"])
def test_a_published_config_names_the_objectives_of_the_fork_alone(tmp_path, objective):
    """The graph does not depend on it: a model trained by energy is exported without the field, and read as mse."""
    backbone = dataclasses.replace(BACKBONE, window=None)
    config = NCPConfig(
        backbone=backbone, concept=Concept(segments=S, codes=N, window=None), loss=Loss(concept_objective=objective),
        **SIZES,
    )  # fmt: skip
    fields = write_config(config, "ncp_olmo3", SpecialIds(), 64, "float32")
    assert fields.get("conceptlm_v22_vq_hlm_loss_type") == {"mse": "mse", "code_ce": "ce"}.get(objective)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    read = read_config(tmp_path).model.loss.concept_objective
    assert read == ("mse" if objective == "energy" else objective)
