"""NCP at one million parameters: trains on the bundled corpus in two minutes on two CPU cores.

    ncp-jax data prepare launch/tiny_corpus/tiny_corpus.jsonl --out corpora/tiny --train-bpe 4096 \
        --split-file launch/tiny_corpus/split.json
    ncp-jax train configs/ncp_nano.py

Expect 2.05 held-out bits per byte at the best checkpoint. 1 MB of text is overfitted after about two epochs.
"""

from ncp_jax.data.config import DataConfig, Source
from ncp_jax.models.ncp.config import Concept, Loss, NCPConfig
from ncp_jax.nn.backbone import Backbone
from ncp_jax.optim.config import OptimConfig, ScheduleConfig
from ncp_jax.train.run_config import EvaluationConfig, RunConfig, TrainConfig

# theta 1e4: rows are 128 tokens long, and 5e5 leaves half of the dimensions without a turn.
BACKBONE = Backbone(width=128, heads=4, ffn=352, window=128, rope_theta=1e4)
# Muon at 0.03 and AdamW at 0.05 are far above a large model's rates: 450 steps are all there is.
OPTIM = OptimConfig(
    muon_learning_rate=0.03, adam_learning_rate=0.05, schedule=ScheduleConfig(kind="cosine", warmup=0.05)
)


def config() -> RunConfig:
    model = NCPConfig(
        vocab=4096,
        encoder_layers=2,
        concept_layers=1,
        decoder_layers=2,
        backbone=BACKBONE,
        concept=Concept(segments=8, codes=32, window=128),
        # 0.1: at 1.0 the auxiliary losses cost 0.1 bits per byte at this size, at 0 the predicted concept drifts.
        loss=Loss(ncp_weight=0.1, vq_weight=0.1),
    )
    return nano("ncp_nano", model)


def nano(name: str, model) -> RunConfig:
    """The nano recipe around any model."""
    return RunConfig(
        name=name,
        model=model,
        data=DataConfig(mixture=(Source("corpora/tiny"),), sequence=128, packing="documents"),
        optim=OPTIM,
        train=TrainConfig(batch=8, steps=450, diagnose_every=50),
        evaluation=EvaluationConfig(every=50, batch=32),
    )
