"""OLMo-3 with the training FLOPs of `ncp_nano`: four layers, the feed-forward widened to 384.

    ncp-jax train configs/olmo3_nano.py

Same data, optimizer and steps as configs/ncp_nano.py, whose header says how to prepare the data. Expect 2.07 held-out
bits per byte.
"""

import dataclasses

from configs.ncp_nano import BACKBONE, nano
from ncp_jax.models.olmo3 import Olmo3Config
from ncp_jax.train.run_config import RunConfig


def config() -> RunConfig:
    return nano("olmo3_nano", Olmo3Config(vocab=4096, layers=4, backbone=dataclasses.replace(BACKBONE, ffn=384)))
