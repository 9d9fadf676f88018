"""Small models with every route alive, for tests that need no training."""

import jax
import jax.numpy as jnp
import numpy as np

from ncp_jax.models.ncp.config import Concept, NCPConfig, paper
from ncp_jax.nn.backbone import Backbone
from ncp_jax.parallel.rules import unboxed

K, VOCAB = 4, 40
BACKBONE = Backbone(width=16, heads=2, ffn=24, window=5, full_every=2, rope_theta=1e4)
SIZES = {"vocab": VOCAB, "encoder_layers": 2, "concept_layers": 2, "decoder_layers": 1}


def presets() -> dict[str, NCPConfig]:
    concept = Concept(chunk=K, segments=4, codes=6, window=2)
    return {
        "released": NCPConfig(backbone=BACKBONE, concept=concept, **SIZES),
        "paper": paper(backbone=BACKBONE, segments=4, codes=6, **SIZES),
    }


def random_params(model, seed: int = 0):
    """Every leaf random: at their initial values most routes are silent."""
    shapes = unboxed(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, K), jnp.int32)))["params"]
    rng = np.random.default_rng(seed)
    dtype = jnp.result_type(float)
    return jax.tree.map(
        lambda a: jnp.asarray(rng.normal(size=a.shape) / np.sqrt(max(a.shape[-1:] or [1])), dtype), shapes
    )
