"""The next-token baseline of configs/calm_nano.py: its backbone, data, optimizer and steps, scored by BrierLM as well.

ncp-jax train configs/calm_baseline_nano.py
ncp-jax brierlm runs/calm_nano runs/calm_baseline_nano
"""

from configs.calm_nano import BACKBONE, LAYERS, nano
from ncp_jax.models.llama import LlamaConfig
from ncp_jax.train.run_config import RunConfig


def config() -> RunConfig:
    return nano("calm_baseline_nano", LlamaConfig(vocab=4096, layers=LAYERS, backbone=BACKBONE))
