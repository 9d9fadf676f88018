"""The ablations of the CALM paper: twelve layers of width 768, 50,000 steps, one thing changed.

    ncp-jax train configs/calm_autoencoder.py
    ncp-jax train configs/calm_ablation.py:beta_1.25

Variants are the arms of Tables 2 to 5 and Figures 4, 6, 7 and 8: ncp_jax/models/calm/presets.py lists them. An arm
that changes the autoencoder needs that of its name: `ncp-jax train configs/calm_autoencoder.py:kl_weight_0.01`. The
chunk sizes of Figure 4 are `:k1`, `:k2`, `:k8`. Not trained by us.
"""

import dataclasses

from configs.calm_autoencoder import SIZES, run_name
from configs.calm_m import language_model
from ncp_jax.models.calm import presets
from ncp_jax.train.run_config import RunConfig

STEPS = 50_000


def config(arm: str = "default") -> RunConfig:
    if arm in SIZES:
        model, autoencoder = presets.calm("S", SIZES[arm]), arm
    else:
        model = presets.calm("S", arm=arm)
        autoencoder = arm if model.autoencoder != presets.autoencoder() else "k4"
    model = dataclasses.replace(model, autoencoder_run=f"runs/{run_name(autoencoder)}")
    return language_model(f"calm_ablation_{arm}", model, STEPS)
