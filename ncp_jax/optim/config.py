"""Optimizer settings: two groups (Muon for matrices, AdamW for the rest) and one schedule shape for both."""

import itertools
from typing import Literal

from ncp_jax.config import ConfigError, frozen

Span = int | float  # whole number of units, or a fraction of the schedule below 1


# The checks stand first: a default ScheduleConfig() is built while this file is still being read.
def _check_span(name: str, value: Span) -> None:
    if value < 0:
        raise ConfigError(f"schedule.{name} {value} is negative; use a count of units or a fraction below 1")
    if isinstance(value, float) and value >= 1 and (value == 1 or not value.is_integer()):
        raise ConfigError(f"schedule.{name} {value} is no fraction below 1 and no whole number; write {int(value)}")


def _require(holds: bool, name: str, value: float | None, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value}; it must be {rule}")


@frozen
class ScheduleConfig:
    """Learning rate over a run, as a multiple of each group's peak. Formulas: optim/schedules.py.

    A span (`warmup`, `decay`, `milestones`, `horizon`) is a whole number of `unit`, or a fraction below 1 of the
    schedule's length (`decay`: of its own cycle).
    """

    kind: Literal["cosine", "wsd", "wsd_s", "constant"] = "cosine"
    warmup: Span = 0.05
    decay: Span = 0.1  # wsd, wsd_s: length of the last descent (of each cycle); cosine descends all the way
    final_fraction: float = 0.1  # multiple of the peak at the last step of a descent
    milestones: tuple[Span, ...] = ()  # wsd_s: ends of the cycles before the last, which ends with the schedule
    unit: Literal["steps", "tokens"] = "steps"
    horizon: int | None = None  # length of the schedule where it is not the run's: the report stopped before its end

    def __post_init__(self):
        for name, value in (("warmup", self.warmup), ("decay", self.decay)):
            _check_span(name, value)
        for value in self.milestones:
            _check_span("milestones", value)
        if not 0 <= self.final_fraction <= 1:
            raise ConfigError(f"schedule.final_fraction {self.final_fraction} is not between 0 and 1 (0.1: a tenth)")
        if self.horizon is not None and self.horizon < 1:
            raise ConfigError(f"schedule.horizon {self.horizon} must be at least 1, or null for the run's length")
        if self.kind in ("wsd", "wsd_s") and self.decay == 0:
            raise ConfigError(f"schedule.kind '{self.kind}' needs schedule.decay above 0; or use 'constant'")
        self._check_milestones()

    def _check_milestones(self) -> None:
        if self.kind == "wsd_s" and not self.milestones:
            raise ConfigError("schedule.kind 'wsd_s' needs schedule.milestones such as [0.25, 0.5]; or use 'wsd'")
        if self.kind != "wsd_s" and self.milestones:
            raise ConfigError(f"schedule.milestones belong to kind 'wsd_s', not '{self.kind}'; remove them")
        if len({value < 1 for value in self.milestones}) > 1:
            raise ConfigError(f"schedule.milestones {list(self.milestones)} mix fractions and counts; use one of them")
        if any(later <= earlier for earlier, later in itertools.pairwise(self.milestones)):
            raise ConfigError(f"schedule.milestones {list(self.milestones)} must increase")


@frozen
class OptimConfig:
    """Muon and AdamW, their rates and decays. With optimizer 'adamw' no muon field is read.

    The default Muon peak is the report's 6e-5 rewritten for the Moonlight scale: 0.2 x 3e-4 = 6e-5.
    """

    optimizer: Literal["muon", "adamw"] = "muon"
    muon_learning_rate: float = 3e-4
    adam_learning_rate: float = 6e-5
    muon_weight_decay: float = 0.1
    adam_weight_decay: float = 0.1  # of AdamW leaves that decay: head, codebooks, route matrices
    embedding_weight_decay: float = 0.0  # the report's recipe: embeddings do not decay
    momentum: float = 0.95
    nesterov: bool = True  # Moonlight; Megatron's default, hence presumably the report's run, is off: see report()
    newton_schulz_steps: int = 5
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: a sixth of the TPU passes
    newton_schulz_layout: Literal["auto", "leaf", "layers"] = "auto"  # layers: whole matrices spread over the devices;
    # auto: layers on more than one device
    scale: Literal["moonlight", "spectral"] = "moonlight"  # 0.2 sqrt(max(in, out)) | spectral_scale sqrt(max(in, out))
    spectral_scale: float = 1.0  # lambda of the report's Eq. 25; undisclosed, 1 in Megatron (assumption)
    per_head_qk: bool = False  # orthogonalise each head's query and key matrix alone
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    clip: float | None = 1.0  # global gradient norm, frozen leaves left out; null: none
    schedule: ScheduleConfig = ScheduleConfig()

    def __post_init__(self):
        for name in ("muon_learning_rate", "adam_learning_rate", "adam_eps", "spectral_scale"):
            _require(getattr(self, name) > 0, f"optim.{name}", getattr(self, name), "above 0")
        for name in ("muon_weight_decay", "adam_weight_decay", "embedding_weight_decay"):
            _require(getattr(self, name) >= 0, f"optim.{name}", getattr(self, name), "0 or more")
        for name in ("momentum", "adam_b1", "adam_b2"):
            _require(0 <= getattr(self, name) < 1, f"optim.{name}", getattr(self, name), "in [0, 1)")
        _require(self.newton_schulz_steps >= 1, "optim.newton_schulz_steps", self.newton_schulz_steps, "at least 1")
        _require(self.clip is None or self.clip > 0, "optim.clip", self.clip, "above 0, or null for no clipping")


def report() -> OptimConfig:
    """The 9B run's recipe: Megatron's Muon (spectral scale, no Nesterov), 6e-5 to 6e-6 over 1,430,512 steps.

    Source: the report's training section and its public launch manifest. Nesterov off and the extra scale of 1 are
    Megatron defaults, not stated values (assumption).
    """
    schedule = ScheduleConfig(kind="cosine", warmup=2000, final_fraction=0.1, horizon=1_430_512)
    return OptimConfig(
        muon_learning_rate=6e-5, adam_learning_rate=6e-5, nesterov=False, scale="spectral", schedule=schedule
    )
