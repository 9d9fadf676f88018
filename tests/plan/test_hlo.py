"""Traffic read from HLO text: loops counted fully, slices as slices, updates as updates, VMEM free."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ncp_jax.parallel.mesh import MeshConfig, make_mesh
from ncp_jax.plan.hlo import largest, parse, traffic

TEXT = """HloModule step, is_scheduled=true

%sliced (param_0: f32[8,1024], param_1: s32[]) -> f32[1,1024] {
  %param_1 = s32[] parameter(1)
  %param_0 = f32[8,1024]{1,0:T(8,128)} parameter(0)
  %zero = s32[] constant(0)
  ROOT %dynamic-slice.1 = f32[1,1024]{1,0} dynamic-slice(%param_0, %param_1, %zero), dynamic_slice_sizes={1,1024}
}

%written (param_0.1: f32[8,1024], param_1.1: f32[1,1024], param_2: s32[]) -> f32[8,1024] {
  %param_0.1 = f32[8,1024]{1,0} parameter(0)
  %param_1.1 = f32[1,1024]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %dynamic-update-slice.1 = f32[8,1024]{1,0} dynamic-update-slice(%param_0.1, %param_1.1, %param_2, %zero.1)
}

%body (arg: (s32[], f32[8,1024])) -> (s32[], f32[8,1024]) {
  %arg = (s32[], f32[8,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %stack = f32[8,1024]{1,0} get-tuple-element(%arg), index=1
  %row = f32[1,1024]{1,0} fusion(%stack, %i), kind=kLoop, calls=%sliced
  %gathered = f32[4,1024]{1,0} all-gather(%row), dimensions={0}, replica_groups=[1,4]<=[4]
  %inside = f32[1,1024]{1,0:T(1,128)S(1)} copy(%row)
  %new = f32[8,1024]{1,0} fusion(%stack, %inside, %i), kind=kLoop, calls=%written
  ROOT %out = (s32[], f32[8,1024]{1,0}) tuple(%i, %new)
}

%condition (arg.1: (s32[], f32[8,1024])) -> pred[] {
  %arg.1 = (s32[], f32[8,1024]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %n = s32[] constant(6)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (a: f32[8,1024]) -> (s32[], f32[8,1024]) {
  %a = f32[8,1024]{1,0} parameter(0)
  %start = s32[] constant(0)
  %init = (s32[], f32[8,1024]{1,0}) tuple(%start, %a)
  %loop = (s32[], f32[8,1024]{1,0}) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %sum = f32[8,1024]{1,0} all-reduce-start(%a), to_apply=%add
  ROOT %done = (s32[], f32[8,1024]{1,0}) copy(%loop)
}
"""  # noqa: E501
ROW = 4 * 1024


def test_a_loop_counts_as_often_as_it_runs():
    found = traffic(TEXT)
    assert found.collective_count == {"all-gather": 6, "all-reduce": 1}
    assert found.collective_bytes["all-gather"] == 6 * 4 * ROW
    assert found.unknown_loops == 0


LENGTH = ', backend_config={"known_trip_count":{"n":"6"}}'


def test_a_loop_whose_length_is_in_its_condition_alone():
    assert traffic(TEXT.replace(LENGTH, "")).collective_count["all-gather"] == 6
    from_one = TEXT.replace(LENGTH, "").replace("%start = s32[] constant(0)", "%start = s32[] constant(1)")
    assert traffic(from_one).collective_count["all-gather"] == 5
    assert traffic(from_one).unknown_loops == 0


def test_a_collective_of_one_device_moves_nothing():
    found = traffic(TEXT.replace("replica_groups=[1,4]<=[4]", "replica_groups={{0},{1},{2},{3}}"))
    assert "all-gather" not in found.collective_count


def test_slices_updates_and_vmem():
    found = traffic(TEXT.replace('"known_trip_count":{"n":"6"}', '"known_trip_count":{"n":"1"}'))
    sliced = 2 * ROW + 4  # the row read and written, and its number
    into_vmem = ROW  # read from HBM; what is written lies in VMEM
    updated = ROW + 4  # the row written in place, and its number; the row itself comes from VMEM
    whole = 2 * (8 * ROW + 4)  # the copy at the end: a tuple read and written
    compare = 4 + 4 + 1
    assert found.hbm_bytes == sliced + into_vmem + updated + whole + compare


def test_a_loop_of_unknown_length_is_reported():
    found = traffic(TEXT.replace(LENGTH, "").replace("direction=LT", "direction=NE"))
    assert (found.unknown_loops, found.collective_count["all-gather"]) == (1, 1)


def test_a_real_program():
    """Eight simulated devices: a matrix that lies over them is gathered once per turn of a scan."""
    mesh = make_mesh(MeshConfig(fsdp=8))
    spread, whole = NamedSharding(mesh, PartitionSpec(None, "fsdp")), NamedSharding(mesh, PartitionSpec())

    def step(x, w_LDD):
        return lax.scan(lambda x, w: (jnp.tanh(x @ lax.with_sharding_constraint(w, whole)), None), x, w_LDD)[0]

    x = jax.ShapeDtypeStruct((4, 64), jnp.float32, sharding=whole)
    w = jax.ShapeDtypeStruct((5, 64, 64), jnp.float32, sharding=spread)
    text = jax.jit(step, out_shardings=whole).lower(x, w).compile().as_text()
    found = traffic(text)
    gathered = found.collective_bytes["all-gather"]
    assert gathered == pytest.approx(5 * 64 * 64 * 4)
    assert found.collective_count["all-gather"] in (1, 5)  # all at once before the loop, or one in each turn
    computations, entry = parse(text)
    assert entry in computations


def test_what_is_sent_to_other_slices():
    send = "%sent = (f32[8,1024]{1,0}, u32[], token[]) send(%a, %t), is_host_transfer=true, frontend_attributes={KIND}"
    kind = '_xla_megascale_reduce_operation="SUM",_xla_megascale_transfer_type="ALL_REDUCE"'
    text = TEXT.replace("  %sum = ", f"  {send.replace('KIND', kind)}\n  %sum = ")
    assert traffic(text).slice_bytes == {"all-reduce": 8 * ROW}
    assert traffic(TEXT).slice_bytes == {}
    assert traffic(text).collective_bytes == traffic(TEXT).collective_bytes


def test_the_largest_array_is_named_by_its_source():
    inside, outside = 'metadata={op_name="step/inside"}', 'metadata={op_name="step/outside"}'
    text = TEXT.replace("dynamic_slice_sizes={1,1024}", f"dynamic_slice_sizes={{1,1024}}, {inside}")
    text = text.replace("to_apply=%add", f"to_apply=%add, {outside}")
    found = dict(largest(text, count=100))
    assert found["step/outside"] == 8 * ROW
    assert "step/inside" not in found  # within a fusion: never in memory
    assert list(found.values()) == sorted(found.values(), reverse=True)
