"""NCP with 190 million non-embedding parameters: width 768, 8/4/8 layers. One accelerator.

    ncp-jax data prepare TEXT... --out corpora/main --tokenizer dolma2.json
    ncp-jax train configs/ncp_190m.py

3.8 B tokens, 20 per non-embedding parameter. Not trained by us yet: rates are an assumption, see OPTIM.
"""

from ncp_jax.data.config import DataConfig, Source
from ncp_jax.models.ncp.config import Concept, Loss, NCPConfig
from ncp_jax.nn.backbone import Backbone
from ncp_jax.optim.config import OptimConfig, ScheduleConfig
from ncp_jax.train.run_config import EvaluationConfig, RunConfig, TrainConfig

# Width, heads and feed-forward of OLMo-2 190M; segments of 128 dimensions, as in the 9B.
BACKBONE = Backbone(width=768, heads=12, ffn=3072, window=4096, remat="dots")


def small(name: str, model: NCPConfig, *, batch: int, tokens: int, rate: float) -> RunConfig:
    """The recipe below 9B around any model. `rate` is the Muon peak on the Moonlight scale, and AdamW's."""
    optim = OptimConfig(
        muon_learning_rate=rate, adam_learning_rate=rate, schedule=ScheduleConfig(kind="cosine", warmup=0.02)
    )
    return RunConfig(
        name=name,
        model=model,
        data=DataConfig(mixture=(Source("corpora/main"),), sequence=4096, packing="documents"),
        optim=optim,
        train=TrainConfig(batch=batch, tokens=tokens, diagnose_every=500),
        evaluation=EvaluationConfig(every=1000, rows=512),
    )


def config() -> RunConfig:
    model = NCPConfig(
        vocab=100_278,
        encoder_layers=8,
        concept_layers=4,
        decoder_layers=8,
        backbone=BACKBONE,
        concept=Concept(segments=6, codes=128),
        # 0.1 as in configs/ncp_nano.py, where 1 hurt and 0 let the predicted concept drift (assumption at this size).
        loss=Loss(ncp_weight=0.1, vq_weight=0.1, head_chunk=4096),
    )
    # 2e-3: assumption, between the nano's 3e-2 and the 9B's 3e-4.
    return small("ncp_190m", model, batch=64, tokens=3_800_000_000, rate=2e-3)
