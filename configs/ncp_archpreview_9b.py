"""NCP-ArchPreview, 8.94 B parameters, Stage 1: the released graph with the report's recipe. A v5p-128 or larger.

    ncp-jax train configs/ncp_archpreview_9b.py --dry-run
    ncp-jax train configs/ncp_archpreview_9b.py

5.73 T tokens of Dolma 3 Mix, tokenised into corpora/dolma3_mix. Sources: the report's Table 10 and training section,
and its public launch manifest (June 2026), which is not proved to be the final run's.
"""

import dataclasses

from ncp_jax.data.config import DataConfig, Source
from ncp_jax.models.ncp.config import Concept, Loss, NCPConfig
from ncp_jax.nn.backbone import Backbone
from ncp_jax.optim.config import report
from ncp_jax.parallel.mesh import MeshConfig
from ncp_jax.train.run_config import EvaluationConfig, RunConfig, TrainConfig

# 4097 visible keys: the training kernels counted 4096 to the left of the query (OLMo-3 itself sees 4096).
BACKBONE = Backbone(width=4096, heads=32, ffn=11_008, window=4097, remat="block")
SIZES = {"vocab": 100_278, "encoder_layers": 16, "concept_layers": 8, "decoder_layers": 16, "backbone": BACKBONE}
TOKENS_PER_STEP = 512 * 8192


def config() -> RunConfig:
    # alpha = beta = 1 on means, divided by the 8192 tokens of a micro-batch: what the training fork computes.
    loss = Loss(ncp_weight=1.0, vq_weight=1.0, aux_weighting="per_token", head_chunk=1024)
    return stage1("ncp_archpreview_9b", NCPConfig(concept=Concept(window=4097), loss=loss, **SIZES))


def stage1(name: str, model) -> RunConfig:
    """The report's first stage around any model of this size."""
    return RunConfig(
        name=name,
        model=model,
        # concat: documents attend across their boundaries and chunks straddle them, as in the report's run.
        data=DataConfig(mixture=(Source("corpora/dolma3_mix"),), sequence=8192, packing="concat"),
        optim=report(),
        train=TrainConfig(batch=512, tokens=1_366_138 * TOKENS_PER_STEP, diagnose_every=1000),
        evaluation=EvaluationConfig(every=2000, rows=1024, keep_best=False),
        mesh=MeshConfig(fsdp=-1),
    )


def stage2(run: RunConfig) -> RunConfig:
    """The report's second stage: 100 B tokens of Dolma 3 Dolmino from the first stage's weights.

    The rates are not in the report. Assumption: they go on from where Stage 1 ended, 6e-6, and descend to zero.
    """
    schedule = dataclasses.replace(run.optim.schedule, horizon=None, warmup=0, final_fraction=0.0)
    optim = dataclasses.replace(run.optim, muon_learning_rate=6e-6, adam_learning_rate=6e-6, schedule=schedule)
    return dataclasses.replace(
        run,
        name=f"{run.name}_stage2",
        data=dataclasses.replace(run.data, mixture=(Source("corpora/dolma3_dolmino"),)),
        optim=optim,
        train=dataclasses.replace(run.train, tokens=100_000_000_000),
    )
