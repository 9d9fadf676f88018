"""The arms whose speed is compared: a plain transformer, the concept path alone, and its routes one kind at a time.

    ncp-jax bench configs/speed.py:190m_vanilla --vs configs/speed.py:190m_concept --vs configs/speed.py:190m_routes
    bash launch/bench_accelerator.sh

Variants are SIZE_ARM, with SIZE nano (for a CPU), 190m or 1b. `vanilla` is OLMo-3 with the encoder's and the decoder's
layers, so that each arm is what comes on top of it: `concept` the concept module, its codebooks and their losses, `irc`
the routes within towers too, `crc` those between towers instead, `routes` both. Not meant to be trained.
"""

import dataclasses

from configs import ncp_1b, ncp_190m, ncp_nano
from ncp_jax.config import ConfigError
from ncp_jax.models.ncp.config import NCPConfig, Routing
from ncp_jax.models.olmo3 import Olmo3Config
from ncp_jax.train.run_config import RunConfig

SIZES = {"nano": ncp_nano.config, "190m": ncp_190m.config, "1b": ncp_1b.config}
NO_IRC = {"irc_encoder": "none", "irc_concept": "none", "irc_decoder": "none"}
NO_CRC = {"concept_from_encoder": False, "decoder_from_encoder": False, "decoder_from_concept": False}
ROUTING = {
    "concept": Routing(**NO_IRC, **NO_CRC),  # type: ignore[arg-type]
    "irc": Routing(**NO_CRC),
    "crc": Routing(**NO_IRC),  # type: ignore[arg-type]
    "routes": Routing(),
}


def config(variant: str = "190m_routes") -> RunConfig:
    size, _, arm = variant.partition("_")
    if size not in SIZES or arm not in ("vanilla", *ROUTING):
        arms = ", ".join(("vanilla", *ROUTING))
        raise ConfigError(
            f"configs/speed.py has no variant '{variant}'; write SIZE_ARM, of {', '.join(SIZES)} and {arms}"
        )
    base = SIZES[size]()
    model = base.model
    assert isinstance(model, NCPConfig)
    if arm == "vanilla":
        layers = model.encoder_layers + model.decoder_layers
        changed = Olmo3Config(
            vocab=model.vocab, layers=layers, backbone=model.backbone, head_chunk=model.loss.head_chunk
        )
    else:
        changed = dataclasses.replace(model, routing=ROUTING[arm])
    return dataclasses.replace(base, name=f"speed_{variant}", model=changed)
