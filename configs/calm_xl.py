"""CALM-XL: 1.83 billion parameters. Everything else, variants included, is as in configs/calm_m.py.

ncp-jax train configs/calm_xl.py
"""

from configs.calm_m import sized
from ncp_jax.train.run_config import RunConfig


def config(variant: str = "k4") -> RunConfig:
    return sized("XL", variant)
