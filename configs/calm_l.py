"""CALM-L: 735 million parameters. Everything else, variants included, is as in configs/calm_m.py.

ncp-jax train configs/calm_l.py
"""

from configs.calm_m import sized
from ncp_jax.train.run_config import RunConfig


def config(variant: str = "k4") -> RunConfig:
    return sized("L", variant)
