"""OLMo-3 7B, the baseline of the report: 32 layers, AdamW at 3e-4.

    ncp-jax train configs/olmo3_7b.py --dry-run

Source: the reference recipe in the report's training fork: same data order and batch as the NCP run, AdamW with
3e-4 to 3e-5 and 2000 steps of warm-up. The report's curves may rest on another optimizer setting (undisclosed).
"""

import dataclasses

from configs.ncp_archpreview_9b import BACKBONE, stage1
from ncp_jax.models.olmo3 import Olmo3Config
from ncp_jax.train.run_config import RunConfig


def config() -> RunConfig:
    backbone = dataclasses.replace(BACKBONE, window=4096)
    run = stage1("olmo3_7b", Olmo3Config(vocab=100_278, layers=32, backbone=backbone, head_chunk=1024))
    optim = dataclasses.replace(run.optim, optimizer="adamw", adam_learning_rate=3e-4)
    return dataclasses.replace(run, optim=optim)
