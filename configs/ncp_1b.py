"""NCP with one billion non-embedding parameters: width 2048, 8/4/8 layers. A v5e-16 or one H200 host.

    ncp-jax data prepare TEXT... --out corpora/main --tokenizer dolma2.json
    ncp-jax train configs/ncp_1b.py

20 B tokens, 20 per non-embedding parameter. Not trained by us yet: rates are an assumption.
"""

from configs.ncp_190m import small
from ncp_jax.models.ncp.config import Concept, Loss, NCPConfig
from ncp_jax.nn.backbone import Backbone
from ncp_jax.train.run_config import RunConfig

# Feed-forward by the ladder's rule, 11008/4096 of the width.
BACKBONE = Backbone(width=2048, heads=16, ffn=5504, window=4096, remat="block")


def config() -> RunConfig:
    model = NCPConfig(
        vocab=100_278,
        encoder_layers=8,
        concept_layers=4,
        decoder_layers=8,
        backbone=BACKBONE,
        concept=Concept(segments=16, codes=128),
        loss=Loss(ncp_weight=0.1, vq_weight=0.1, head_chunk=4096),
    )
    # 1e-3: assumption, between the nano's 3e-2 and the 9B's 3e-4.
    return small("ncp_1b", model, batch=256, tokens=20_000_000_000, rate=1e-3)
