"""CheckpointConfig: when a run is saved, and how much of it is kept."""

from ncp_jax.config import ConfigError, frozen


@frozen
class CheckpointConfig:
    """A checkpoint is due after `every_steps` or `every_minutes`, whichever comes first; None switches that one off.

    With both None only the end of the run is saved.
    """

    every_steps: int | None = None
    every_minutes: float | None = 30.0  # wall clock: the most that a preemption costs
    keep: int = 2  # newest ones kept; two, so that one damaged checkpoint does not end a run
    asynchronous: bool = True  # write in the background while training goes on
    timeout_seconds: int = 1200  # a save that takes longer has failed

    def __post_init__(self):
        for name in ("every_steps", "every_minutes", "timeout_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                off = "" if name == "timeout_seconds" else "; null switches it off"
                raise ConfigError(f"checkpoint.{name} must be positive, got {value}{off}")
        if self.keep < 1:
            raise ConfigError(
                f"checkpoint.keep must be at least 1, got {self.keep}: the newest checkpoint is the resume point"
            )
