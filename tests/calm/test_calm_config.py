"""Configs: bad values are refused with their remedy; every named arm builds and says what it changes."""

import dataclasses

import pytest

from ncp_jax.config import ConfigError, from_dict, to_dict
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig, DiffusionHead, EnergyHead
from ncp_jax.models.calm.presets import ARMS, CHUNKS, SIZES, autoencoder, calm
from ncp_jax.nn.llama_block import LlamaBackbone


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EnergyHead(beta=0.0), r"head.beta: .* is 0.0; it must lie in \(0, 2\]"),
        (lambda: EnergyHead(beta=2.5), r"head.beta: .* is 2.5"),
        (lambda: EnergyHead(samples=1), "samples is 1; .* at least 2"),
        (lambda: EnergyHead(draws=0), "head.draws must be at least 1, got 0"),
        (lambda: DiffusionHead(steps=1), "steps is 1; .* 2 to 1000"),
        (lambda: AutoencoderConfig(9, encoder_layers=3), "encoder_layers is 3; .* must be even: 2 or 4"),
        (lambda: AutoencoderConfig(9, latent_dropout=1.0), r"latent_dropout is 1.0; .* \[0, 1\)"),
        (lambda: AutoencoderConfig(9, chunk=0), "chunk must be at least 1"),
        (lambda: AutoencoderConfig(9, pad=9), "pad 9 is no id of a vocabulary of 9"),
        (lambda: LlamaBackbone(30, 4, 8), "30 does not divide into 4 heads .* 24 or 32"),
        (lambda: LlamaBackbone(32, 4, 8, kv_heads=3), "heads 4 is not a multiple of kv_heads 3"),
        (lambda: calm("H"), "no size 'H'; known: S, M, L, XL"),
        (lambda: calm("M", arm="beta_3"), "no arm 'beta_3'; known: default"),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("arm", ARMS)
def test_arms_round_trip(arm):
    c = calm("S", arm=arm)
    assert from_dict(CalmConfig, to_dict(c)) == c
    assert c.head.blocks == 3  # the 12-layer ablation model


def test_arms_change_what_their_names_say():
    default = calm("S")
    assert calm("S", arm="beta_0.75").head == dataclasses.replace(default.head, beta=0.75)
    assert calm("S", arm="samples_12").head == dataclasses.replace(default.head, samples=12)
    assert calm("S", arm="draws_200").head == dataclasses.replace(default.head, draws=200)
    assert calm("S", arm="input_both") == dataclasses.replace(default, input="both")
    assert calm("S", arm="latent_64").autoencoder == autoencoder(latent=64, token_dropout=0.1, latent_dropout=0.1)
    assert calm("S", arm="plain_kl").autoencoder.kl_floor == 0
    assert calm("S", arm="reconstruction_only").autoencoder.posterior == "mean"
    assert calm("S", arm="diffusion").head.kind == "diffusion"


def test_sizes_and_chunks():
    assert [calm(size).head.blocks for size in SIZES] == [3, 4, 4, 4]
    assert [calm("L", k).autoencoder.latent for k in CHUNKS] == [32, 64, 128, 256]
    assert [calm("L", k).chunk for k in CHUNKS] == list(CHUNKS)
