"""OLMo-3 with the parameters of `ncp_nano`: five layers of the same shape, at 1.17 times its FLOPs.

    ncp-jax train configs/olmo3_nano_wide.py

Same data, optimizer and steps as configs/ncp_nano.py, whose header says how to prepare the data.
"""

from configs.ncp_nano import BACKBONE, nano
from ncp_jax.models.olmo3 import Olmo3Config
from ncp_jax.train.run_config import RunConfig


def config() -> RunConfig:
    return nano("olmo3_nano_wide", Olmo3Config(vocab=4096, layers=5, backbone=BACKBONE))
