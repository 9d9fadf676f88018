"""Sharding rules: names to mesh axes, what cannot be split, and claims that collide."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from tiny_runs import MODELS

from ncp_jax.config import ConfigError
from ncp_jax.parallel.mesh import MeshConfig, make_mesh
from ncp_jax.parallel.rules import format_placements, place, placements, shardings, unboxed
from ncp_jax.train.families import build_task
from ncp_jax.train.step import abstract_params


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=2, tensor=2))


def boxed(shape: tuple[int, ...], names: tuple) -> nn.LogicallyPartitioned:
    return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)


def test_names_become_axes(mesh):
    tree = {
        "wq": boxed((3, 8, 4, 2), ("layers", "embed", "heads", "head_dim")),
        "w_down": boxed((6, 8), ("mlp", "embed")),
        "scale": boxed((8,), ("norm",)),
        "plain": jax.ShapeDtypeStruct((4,), jnp.float32),
    }
    assert jax.tree.map(lambda s: s.spec, shardings(place(tree, mesh))) == {
        "wq": P(None, "fsdp", "tensor", None), "w_down": P("tensor", "fsdp"), "scale": P(None), "plain": P(None),
    }  # fmt: skip
    assert unboxed(tree)["w_down"].shape == (6, 8)


def test_what_does_not_divide_stays_whole_and_is_reported(mesh):
    tree = {"odd": boxed((8, 5), ("embed", "mlp")), "even": boxed((8, 4), ("embed", "mlp"))}
    odd = placements(place(tree, mesh))[1]
    assert odd.sharding.spec == P("fsdp", None)
    assert odd.whole == ("'mlp' of size 5 does not divide over tensor = 2",)
    text = format_placements(place(tree, mesh))
    assert "not split: odd [8, 5]: 'mlp' of size 5 does not divide over tensor = 2" in text
    assert "parameters per device: 112 B" in text  # 8/2 x 5 x 4 B + 8/2 x 4/2 x 4 B


def test_layers_share_a_line(mesh):
    tree = {f"irc_{layer}": {"w1": boxed((8, layer + 2), ("norm", "sources"))} for layer in range(11)}
    (line, total) = format_placements(place(tree, mesh)).splitlines()
    assert line.split() == ["irc_*/w1", "11", "x", "[8,", "2..12]", "P(None,", "None)", "2,464", "B"]
    assert total == "parameters per device: 2,464 B"


def test_an_unknown_name_and_a_double_claim_are_errors_of_the_table(mesh):
    with pytest.raises(ConfigError, match=r"parameter a names axis 'width', which parallel/rules.py does not list"):
        place({"a": boxed((8,), ("width",))}, mesh)
    with pytest.raises(ConfigError, match=r"parameter a: both 'heads' and 'mlp' claim mesh axis 'tensor'"):
        place({"a": boxed((4, 4), ("heads", "mlp"))}, mesh)


@pytest.mark.parametrize("model", MODELS)
def test_every_matrix_is_split(model, mesh):
    """Blocks, embedding, head, concept heads and codebook lie in pieces; route matrices and vectors are whole."""
    found = placements(place(abstract_params(build_task(MODELS[model], 16))[0], mesh))
    assert not [placement for placement in found if placement.whole]
    pieces = {p.path: np.prod(p.shape) * 4 // p.bytes_per_device for p in found}
    matrices = r"(.*/)?(w[qkvo]|w_gate|w_up|w_down|table|kernel)"
    assert {pieces[path] for path in pieces if re.fullmatch(matrices, path)} == {4}
    assert model == "olmo3" or pieces["concept/codebook/codes"] == 2  # segments over tensor
