"""Laws of the forward pass: no token sees the future, and a packed document does not see its neighbours.

Causality is exact: all perturbed rows run in one executable, and logits before the change are equal bit for bit.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_tests import BACKBONE, VOCAB, K, presets, random_params

from ncp_jax.models.ncp.config import NCPConfig, Routing
from ncp_jax.models.ncp.losses import sums, weights
from ncp_jax.models.ncp.model import NCP
from ncp_jax.models.olmo3 import Olmo3, Olmo3Config


def cases() -> dict[str, NCPConfig]:
    """Both presets over all eight CRC subsets, with mixing and IRC modes taking turns."""
    found = {}
    mixes, modes = itertools.cycle(["raw_logits", "softmax", "hard"]), itertools.cycle(["signed", "softmax", "none"])
    for (name, base), crc in itertools.product(presets().items(), itertools.product([True, False], repeat=3)):
        mix, modes3 = next(mixes), (next(modes), next(modes), next(modes))
        next(modes)
        paths = dict(zip(("concept_from_encoder", "decoder_from_encoder", "decoder_from_concept"), crc, strict=True))
        irc = dict(zip(("irc_encoder", "irc_concept", "irc_decoder"), modes3, strict=True))
        label = f"{name}-{mix}-{'.'.join(modes3)}-{''.join('01'[on] for on in crc)}"
        found[label] = dataclasses.replace(
            base,
            concept=dataclasses.replace(base.concept, mix=mix),
            routing=dataclasses.replace(base.routing, **paths, **irc),
        )
    return found


def logits_of(model, params):
    return jax.jit(lambda *batch: model.apply({"params": params}, *batch, method="logits"))


def perturbed(T: int) -> tuple[np.ndarray, np.ndarray]:
    """A base row, and one row per position with that token changed."""
    base = np.random.default_rng(1).integers(0, VOCAB, T)
    rows = np.tile(base, (T, 1))
    rows[np.arange(T), np.arange(T)] = (base + 7) % VOCAB
    return base, rows


def check_causal(model, params, T: int):
    base, rows = perturbed(T)
    logits = np.asarray(logits_of(model, params)(np.concatenate([base[None], rows])))
    for t in range(T):
        np.testing.assert_array_equal(logits[1 + t, :t], logits[0, :t], err_msg=f"token {t} reached the past")
        assert np.abs(logits[1 + t, t:] - logits[0, t:]).max() > 0, f"token {t} changes nothing at all"


@pytest.mark.parametrize("T", [4 * K, 3 * K + 2])
@pytest.mark.parametrize("case", cases())
def test_no_token_sees_the_future(case, T):
    model = NCP(cases()[case])
    check_causal(model, random_params(model), T)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("fusion", ["normed_add", "add", "scalar_gate"])
def test_other_injections_are_causal(shift, fusion):
    base = presets()["released"]
    model = NCP(dataclasses.replace(base, concept=dataclasses.replace(base.concept, shift=shift, fusion=fusion)))
    check_causal(model, random_params(model), 3 * K + 2)


def test_concepts_carry_information_to_later_chunks():
    """With every token path closed (window 1, no routes from the encoder), only concepts reach the next chunk."""
    base = presets()["paper"]
    config = dataclasses.replace(
        base,
        backbone=dataclasses.replace(BACKBONE, window=1, full_every=100),
        routing=dataclasses.replace(base.routing, decoder_from_encoder=False),
    )
    model = NCP(config)
    base_row, rows = perturbed(3 * K)
    logits = np.asarray(logits_of(model, random_params(model))(np.concatenate([base_row[None], rows])))
    changed = np.abs(logits[1:] - logits[0]).max(axis=-1) > 0
    for t in range(3 * K):
        first_user = (t // K + 1) * K - 1  # the last token of t's own chunk is the first to receive it
        expected = [u == t or u >= first_user for u in range(3 * K)]
        np.testing.assert_array_equal(changed[t], expected, err_msg=f"token {t}")


def packed(lengths: list[int]) -> dict[str, np.ndarray]:
    """One row of documents, each padded to a multiple of k, and a tail of padding."""
    rng = np.random.default_rng(2)
    size = sum(-(-n // K) * K for n in lengths) + K
    row = {name: np.zeros(size, np.int32) for name in ("tokens", "segments", "positions")}
    start = 0
    for number, n in enumerate(lengths, 1):
        row["tokens"][start : start + n] = rng.integers(0, VOCAB, n)
        row["segments"][start : start + n] = number
        padded = -(-n // K) * K
        row["positions"][start : start + padded] = np.arange(padded)
        start += padded
    return {name: value[None] for name, value in row.items()}


def documents(row: dict[str, np.ndarray], lengths: list[int]):
    start = 0
    for n in lengths:
        yield slice(start, start + n)
        start += -(-n // K) * K


@pytest.mark.parametrize("name", ["released", "paper"])
@pytest.mark.parametrize("wide", [True, False])
def test_a_packed_document_gives_what_it_gives_alone(name, wide):
    lengths = [11, 8, 3, 14]  # tails of 3, 0, 3 and 2 tokens; one document without a concept
    with jax.enable_x64(wide):
        model = NCP(presets()[name], jnp.result_type(float))
        params, row = random_params(model), packed(lengths)
        together = logits_of(model, params)(row["tokens"], row["segments"], row["positions"])[0]
        for place in documents(row, lengths):
            alone = logits_of(model, params)(row["tokens"][:, place])[0]
            np.testing.assert_allclose(together[place], alone, atol=1e-9 if wide else 5e-4, rtol=0)


def test_neighbours_do_not_matter_at_all():
    lengths = [11, 8, 14]
    model = NCP(presets()["released"])
    params, row = random_params(model), packed(lengths)
    forward = logits_of(model, params)
    before = forward(row["tokens"], row["segments"], row["positions"])[0]
    places = list(documents(row, lengths))
    for changed in range(3):
        tokens = row["tokens"].copy()
        tokens[0, places[changed]] = (tokens[0, places[changed]] + 5) % VOCAB
        after = forward(tokens, row["segments"], row["positions"])[0]
        for other in {0, 1, 2} - {changed}:
            np.testing.assert_array_equal(before[places[other]], after[places[other]])


def test_packed_losses_and_gradients_are_the_sum_of_the_documents():
    lengths = [11, 8]
    with jax.enable_x64(True):
        c = presets()["released"]
        model = NCP(c, jnp.float64)
        params, row = random_params(model), packed(lengths)

        def total(params, tokens, segments=None, positions=None):
            real = jnp.ones_like(tokens) if segments is None else segments
            targets = jnp.roll(tokens, -1, axis=1)
            inside = jnp.roll(real, -1, axis=1) == real  # the last token of a document has no target here
            scored = (real > 0) & inside & (jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1)
            hidden = model.apply({"params": params}, tokens, segments, positions)
            return sums(c, hidden, params, targets, scored), weights(c, scored, real)

        run = jax.jit(jax.value_and_grad(lambda *a: sum(total(*a)[0].values())))
        value, gradient = run(params, row["tokens"], row["segments"], row["positions"])
        parts = [run(params, row["tokens"][:, place]) for place in documents(row, lengths)]
        np.testing.assert_allclose(value, sum(part[0] for part in parts), rtol=1e-12)
        jax.tree.map(
            lambda whole, *each: np.testing.assert_allclose(whole, sum(each), atol=1e-9 * (1 + np.abs(whole).max())),
            gradient,
            *(part[1] for part in parts),
        )
        counted = total(params, row["tokens"], row["segments"], row["positions"])[1]
        width = BACKBONE.width
        assert int(counted["vq"]) == (2 + 2) * width
        assert int(counted["ncp"]) == (1 + 1) * width


@pytest.mark.parametrize("window", [None, 3])
def test_olmo3_is_causal_and_its_scan_is_its_loop(window):
    config = Olmo3Config(vocab=VOCAB, layers=5, backbone=dataclasses.replace(BACKBONE, window=window))
    model = Olmo3(config)
    params = random_params(model)
    check_causal(model, params, 10)
    _, rows = perturbed(10)
    loop = Olmo3(dataclasses.replace(config, scan=False))
    np.testing.assert_allclose(logits_of(model, params)(rows), logits_of(loop, params)(rows), atol=5e-4)


def test_routing_default_is_the_released_graph():
    assert presets()["released"].routing == Routing()
