"""CheckpointConfig refuses what cannot be scheduled."""

import pytest

from ncp_jax.checkpoint.config import CheckpointConfig
from ncp_jax.config import ConfigError, from_dict, to_dict


def test_round_trip_and_defaults():
    config = CheckpointConfig(every_steps=100, every_minutes=None, keep=3)
    assert from_dict(CheckpointConfig, to_dict(config)) == config
    assert CheckpointConfig().every_minutes is not None, "by default a run is saved now and then"


@pytest.mark.parametrize("field", [{"every_steps": 0}, {"every_minutes": -1.0}, {"keep": 0}, {"timeout_seconds": 0}])
def test_impossible_values_are_named(field):
    with pytest.raises(ConfigError, match=next(iter(field))):
        CheckpointConfig(**field)
