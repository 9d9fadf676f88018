"""A method of a module on given parameters."""

from typing import Any

import flax.linen as nn


def call(model: nn.Module, params: Any, method: str, *arguments: Any) -> Any:
    """`model.method(*arguments)` with `params`. Linen's `apply` has a return type that fits no caller."""
    return model.apply({"params": params}, *arguments, method=method)
