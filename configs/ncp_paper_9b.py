"""The report's equations as printed, at the size of NCP-ArchPreview and with its recipe.

    ncp-jax train configs/ncp_paper_9b.py --dry-run

Differs from configs/ncp_archpreview_9b.py in every switch that the preset `paper` sets (models/ncp/config.py).
"""

import dataclasses

from configs.ncp_archpreview_9b import SIZES, stage1
from ncp_jax.models.ncp.config import paper
from ncp_jax.train.run_config import RunConfig


def config() -> RunConfig:
    sizes = SIZES | {"backbone": dataclasses.replace(SIZES["backbone"], window=4096)}
    model = paper(segments=32, codes=128, **sizes)
    return stage1("ncp_paper_9b", dataclasses.replace(model, loss=dataclasses.replace(model.loss, head_chunk=1024)))
