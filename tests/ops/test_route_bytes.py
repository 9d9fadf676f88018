"""Declared kernel costs against what their block mappings move, walked program by program, and the states read."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from ncp_jax.ops.route_bytes import ideal_states, kernel_states
from ncp_jax.ops.route_kernels import Kernels
from ncp_jax.ops.route_shapes import At, Cross, Crosses, Depth, Inject, Masks, Outside, Reads, Shift, Sources, Summary

B, T, D, L, SE, SC, K = 1, 512, 4096, 4, 4, 3, 4
STATE = T * D * 2
SHIFT = Shift(K, True)


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def states(*lead: int, tokens: int = T) -> jax.ShapeDtypeStruct:
    return array(*lead, B, tokens, D, dtype=jnp.bfloat16)


def crosses(*lead: int) -> Crosses:
    def cross(S: int) -> Cross:
        return Cross(array(*lead, D), array(*lead, D), array(*lead, S, D), array(*lead, S, S))

    return Crosses(Inject(array(*lead, D), array(*lead, D)), cross(SE), cross(SC))


N, M = L + 1, T // K
DEPTH = Depth(array(N), array(N, D), array(N, N))
MASKS = Masks(array(B, T, 1), array(B, T, 1))
READS = Reads(
    states(tokens=M), Sources(states(SE), array(B, T, SE), array(B, T, SE)),
    Sources(states(SC, tokens=M), array(B, T, SC), array(B, T, SC)),
)  # fmt: skip
OUTSIDE = Outside(states(L), states(L, tokens=M), array(L, B, T), array(L, B, T))
OPS = Kernels()


def call_of(function, *like):
    """Parameters of the one kernel that the function calls."""
    found = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                found.append(equation.params)
            for value in equation.params.values():
                if hasattr(value, "jaxpr") and equation.primitive.name != "pallas_call":
                    walk(value.jaxpr)

    walk(jax.make_jaxpr(function)(*like).jaxpr)
    (params,) = found
    return params


def walked(params, count: int) -> int:
    """Bytes of all blocks whose start differs from the program's before."""
    mapping, total = params["grid_mapping"], 0
    for block in mapping.block_mappings:
        shape = [getattr(side, "block_size", side) for side in block.block_shape]
        itemsize = block.array_aval.dtype.itemsize
        rows = min(shape[-2], block.array_aval.shape[-2])
        size = math.prod(shape[:-2]) * -(-rows * itemsize // 32) * 32 * -(-shape[-1] // 128) * 128
        starts = [
            tuple(int(x) for x in block.compute_start_indices_interpret(program, jnp.array([count], jnp.int32)))
            for program in itertools.product(*map(range, mapping.grid))
        ]
        total += size * (1 + sum(a != b for a, b in itertools.pairwise(starts)))
    return total


def depth_forward_of(layer: int):
    return call_of(
        lambda x, raw, p: OPS.depth_forward(At(layer, (layer,)), x, raw, None, p, True, Summary(1e-6, K)),
        states(),
        states(L),
        DEPTH,
    )


def depth_backward_of(layer: int):
    return call_of(
        lambda x, raw, p, dz, w, outside: OPS.depth_backward(
            At(layer, (layer,)), x, raw, None, p, True, dz, w, outside, K
        ),
        states(), states(L), DEPTH, states(L), array(L, B, T, N), OUTSIDE,
    )  # fmt: skip


CROSS = {
    "forward": lambda: call_of(
        lambda z, p, reads, masks: OPS.cross_forward(z, p, reads, masks, SHIFT), states(), crosses(), READS, MASKS
    ),
    "backward": lambda: call_of(
        lambda dh, z, p, reads, masks: OPS.cross_backward(dh, z, p, reads, masks, SHIFT),
        states(), states(), crosses(), READS, MASKS,
    ),
    "gather": lambda: call_of(
        lambda dh, trace, p, reads, masks: OPS.cross_gather(dh, trace, p, reads, masks, SHIFT),
        states(L), array(L, B, T, 2 * (SE + SC)), crosses(L), READS, MASKS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_depth_routes_declare_what_they_move(layer):
    """And that is each state that exists, once: layer + 2 and one written; backward, cotangents of later layers too."""
    forward, backward = depth_forward_of(layer), depth_backward_of(layer)
    for params in (forward, backward):
        assert params["cost_estimate"].bytes_accessed == walked(params, layer + 2)
    small = 0.3  # states: weights and parameters
    assert 0 <= forward["cost_estimate"].bytes_accessed / STATE - (layer + 3 + 1 / K) < small
    # Mixed states, own and later cotangents (at least one block is fetched), cotangents from outside, one written.
    expected = (layer + 2) + 1 + max(L - 1 - layer, 1) + 1 + 1 / K + 1
    assert 0 <= backward["cost_estimate"].bytes_accessed / STATE - expected < 2 * small


@pytest.mark.parametrize("name", CROSS)
def test_cross_routes_declare_what_they_move(name):
    """And that is each source once, concepts at their own rate."""
    params = CROSS[name]()
    assert params["cost_estimate"].bytes_accessed == walked(params, 0)
    concepts = (SC + 1) / K * (1 + K / 64)  # and the one before each tile of 64 tokens
    expected = {"forward": SE + concepts + 2, "backward": SE + concepts + 3, "gather": L + SE + concepts}[name]
    assert 0 <= params["cost_estimate"].bytes_accessed / STATE - expected < 2.5  # per-token scalars, edges, parameters


def test_a_block_too_many_is_seen():
    """The walk tells one layer from the next."""
    assert depth_forward_of(2)["cost_estimate"].bytes_accessed != walked(depth_forward_of(2), 3)


def test_the_released_size_moves_less_than_1_5_times_the_ideal():
    """16/8/16 layers at k = 4; the ideal by hand: 152 + 152 + 11 depth, 256 + 32 + 30 cross, 4 injected, twice."""
    assert ideal_states(16, 8, 16, 4) == 1274
    parts = kernel_states(16, 8, 16, 4)
    assert sum(parts.values()) <= 1.5 * 1274, parts


def test_parts_are_what_kernels_declare():
    """The small tower of this file, in the formula's terms."""
    forward = sum(depth_forward_of(layer)["cost_estimate"].bytes_accessed for layer in range(L)) / STATE
    backward = sum(depth_backward_of(layer)["cost_estimate"].bytes_accessed for layer in range(L)) / STATE
    parts = kernel_states(L, 0, 0, K)  # an encoder alone
    assert parts["depth_forward"] == pytest.approx(forward, rel=0.05)
    assert parts["depth_backward"] == pytest.approx(backward, rel=0.05)
