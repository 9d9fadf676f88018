"""RunConfig: everything about one training run, and the arithmetic between its parts."""

from typing import Annotated, Literal

from pydantic import Discriminator

from ncp_jax.checkpoint.config import CheckpointConfig
from ncp_jax.config import ConfigError, frozen
from ncp_jax.data.config import DataConfig, check_chunk
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig
from ncp_jax.models.llama import LlamaConfig
from ncp_jax.models.ncp.config import NCPConfig
from ncp_jax.models.olmo3 import Olmo3Config
from ncp_jax.optim.config import OptimConfig
from ncp_jax.parallel.mesh import MeshConfig
from ncp_jax.parallel.processes import ProcessesConfig

ModelConfig = Annotated[NCPConfig | Olmo3Config | AutoencoderConfig | CalmConfig | LlamaConfig, Discriminator("kind")]


@frozen
class TrainConfig:
    """How long, how many rows, and what happens on the way."""

    batch: int  # rows per optimizer step, over all devices
    steps: int | None = None  # exactly one of steps and tokens
    tokens: int | None = None
    micro_batches: int = 1  # parts of a batch whose gradients are accumulated one after another
    seed: int = 0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of matmuls; auto: bfloat16 on accelerators
    log_every: int = 10
    diagnose_every: int | None = None  # codebook, routes, norms by role
    on_bad_step: Literal["stop", "skip"] = "stop"  # gradient not finite, or above gradient_ceiling
    gradient_ceiling: float | None = None

    def __post_init__(self):
        if (self.steps is None) == (self.tokens is None):
            raise ConfigError(f"give exactly one of train.steps ({self.steps}) and train.tokens ({self.tokens})")
        for name in ("batch", "micro_batches", "log_every", "steps", "tokens", "diagnose_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"train.{name} must be at least 1, got {value}")
        if self.batch % self.micro_batches:
            lower = self.batch // self.micro_batches * self.micro_batches
            raise ConfigError(
                f"train.batch {self.batch} does not divide into {self.micro_batches} micro-batches; nearest legal "
                f"train.batch: {' or '.join(str(n) for n in (lower, lower + self.micro_batches) if n)}"
            )


@frozen
class EvaluationConfig:
    """Losses on held-out documents, during training and at its end."""

    every: int | None = None  # steps; the end is always evaluated
    batch: int | None = None  # rows; None: the training batch
    rows: int | None = None  # None: all
    split: str = "val"
    keep_best: bool = True  # save a checkpoint whenever bits per byte, or else the loss, reach a new low


@frozen
class InitFrom:
    """Weights only, from another run: the optimizer, the schedule and the data start anew (the report's Stage 2)."""

    run: str
    step: int | Literal["latest", "best"] = "latest"


@frozen
class RunConfig:
    """One run. Its identity is a hash of everything but where it runs and how it is watched (config.NOT_IDENTITY)."""

    name: str
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()
    processes: ProcessesConfig = ProcessesConfig()
    init_from: InitFrom | None = None
    workdir: str | None = None  # None: runs/NAME

    def __post_init__(self):
        check_chunk(self.data.sequence, self.model.chunk)

    @property
    def directory(self) -> str:
        return self.workdir or f"runs/{self.name}"

    @property
    def evaluation_batch(self) -> int:
        return self.evaluation.batch or self.train.batch

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch * self.data.sequence

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run; a budget in tokens is rounded up to whole steps."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.tokens is not None
        return -(-self.train.tokens // self.tokens_per_step)
