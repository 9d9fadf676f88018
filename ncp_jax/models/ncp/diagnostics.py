"""What a diagnostic step looks at: codebook use, predictions against baselines, route weights by depth, gates.

Shapes: B batch, M concepts, D width, S segments, N codes, n sources, L layers.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ncp_jax.models.ncp.config import NCPConfig
from ncp_jax.models.ncp.losses import nearest_codes
from ncp_jax.models.ncp.model import Hidden
from ncp_jax.ops.quantise import usage
from ncp_jax.ops.statistics import perplexity

ROUTES = {  # name in the metrics -> (tower, prefix of its route modules)
    "routes/encoder": ("encoder", "irc_"),
    "routes/concept": ("concept", "irc_"),
    "routes/decoder": ("decoder", "irc_"),
    "routes/concept_from_encoder": ("concept", "read_encoder_"),
    "routes/decoder_from_encoder": ("decoder", "read_encoder_"),
    "routes/decoder_from_concept": ("decoder", "read_concept_"),
}


def statistics(c: NCPConfig, hidden: Hidden, params: dict, intermediates: dict) -> dict[str, Any]:
    """Codes per segment (perplexity, used fraction, dead count), mean route weights, gates, prediction error.

    Usage counts real concepts of the whole batch. Lists of route weights are ragged: one array [n] per layer.
    """
    count_SN = usage(
        nearest_codes(c, hidden.concepts_BMD, params["concept"]["codebook"]["codes"]),
        hidden.concept_segments_BM > 0,
        c.concept.codes,
    )
    found: dict[str, Any] = {
        "codes/perplexity": perplexity(count_SN),
        "codes/used": (count_SN > 0).mean(axis=-1),
        "codes/dead": (count_SN == 0).sum(axis=-1),
    }
    for name, (tower, prefix) in ROUTES.items():
        layers = _route_weights(intermediates.get(tower, {}), prefix)
        if layers:
            found[name] = layers
    if "gates" in intermediates.get("decoder", {}):
        found["gates"] = intermediates["decoder"]["gates"][0]
    return found | _prediction_errors(hidden)


def _route_weights(tower: dict, prefix: str) -> list[Array]:
    numbered = sorted(int(name.removeprefix(prefix)) for name in tower if name.startswith(prefix))
    return [tower[f"{prefix}{layer}"]["weights"][0].mean(axis=(0, 1)) for layer in numbered]


def _prediction_errors(hidden: Hidden) -> dict[str, Array]:
    """Mean squared error of the predicted concept beside two baselines: the last concept, and the mean."""
    concept_BM = hidden.concept_segments_BM
    pair_BM1 = ((concept_BM[:, 1:] > 0) & (concept_BM[:, 1:] == concept_BM[:, :-1]))[..., None]
    target_BMD, last_BMD = hidden.concepts_BMD[:, 1:], hidden.concepts_BMD[:, :-1]
    count = jnp.maximum(pair_BM1.sum(), 1)
    mean_D = jnp.where(pair_BM1, target_BMD, 0).sum(axis=(0, 1)) / count

    def error(guess) -> Array:
        return jnp.where(pair_BM1, (guess - target_BMD) ** 2, 0).sum() / (count * target_BMD.shape[-1])

    return {
        "concept_error/predicted": error(hidden.predicted_BMD[:, :-1]),
        "concept_error/copy_last": error(last_BMD),
        "concept_error/mean": error(mean_D),
    }
