"""NCP-ArchPreview, Stage 2: 100 B tokens of Dolma 3 Dolmino from the weights of Stage 1.

    ncp-jax train configs/ncp_archpreview_9b_stage2.py

Reads runs/ncp_archpreview_9b; optimizer, schedule and data start anew.
"""

import dataclasses

from configs import ncp_archpreview_9b as first
from ncp_jax.train.run_config import InitFrom, RunConfig


def config() -> RunConfig:
    stage1 = first.config()
    return dataclasses.replace(first.stage2(stage1), init_from=InitFrom(run=stage1.directory))
