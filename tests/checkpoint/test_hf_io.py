"""Tensors to leaves and back: nothing unaccounted for, any sharding, bounded memory."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_files import write_shards
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from ncp_jax.checkpoint.hf_files import HFError, TensorFiles
from ncp_jax.checkpoint.hf_io import load_leaves, match, save_leaves
from ncp_jax.checkpoint.hf_names import BlockSizes
from ncp_jax.checkpoint.hf_ncp_names import NCPSizes, native_map, ncp_olmo3_map, olmo3_map
from ncp_jax.checkpoint.hf_writer import TensorWriter
from ncp_jax.checkpoint.leaves import CheckpointMismatch
from ncp_jax.parallel.mesh import MeshConfig, make_mesh

NAMES = olmo3_map(BlockSizes(16, 4, 2, 24, True), vocab=24, layers=3)
NCP_NAMES = ncp_olmo3_map(NCPSizes(BlockSizes(16, 2, 2, 24, False), 11, 2, 1, 1, 4, 3))
NATIVE_NAMES = native_map(NCPSizes(BlockSizes(16, 2, 2, 24, False), 11, 2, 1, 1, 4, 3))
HERE = SingleDeviceSharding(jax.local_devices()[0])


def random_tensors(names, dtype=np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {tensor.name: random.standard_normal(tensor.shape).astype(dtype) for tensor in names.tensors}


def opened(folder, named) -> TensorFiles:
    write_shards(folder, named)
    return TensorFiles(folder)


def places(names, sharding=HERE):
    return dict.fromkeys(names.leaves(), sharding)


def problems(folder, names, named) -> list[str]:
    with pytest.raises(CheckpointMismatch) as caught:
        match(names, opened(folder, named))
    first, *lines = str(caught.value).splitlines()
    assert str(folder) in first
    assert f"{len(lines)} tensors differ" in first
    return [line.strip() for line in lines]


def test_missing_unexpected_and_misshapen_tensors_are_listed_with_shapes(tmp_path):
    named = random_tensors(NAMES)
    del named["model.norm.weight"]
    named["model.layers.3.mlp.up_proj.weight"] = np.zeros((24, 16), np.float32)
    named["lm_head.weight"] = np.zeros((25, 16), np.float32)
    assert problems(tmp_path, NAMES, named) == [
        "missing: model.norm.weight [16], absent here",
        "shape: lm_head.weight is [25, 16], the configuration needs [24, 16]",
        "unexpected: model.layers.3.mlp.up_proj.weight [24, 16], no tensor of this model",
    ]


def test_duplicates_under_two_prefixes_are_listed_with_shapes(tmp_path):
    named = random_tensors(NCP_NAMES)
    named["wrapper.fusion_norm_alpha"] = np.zeros(1, np.float32)
    (line,) = problems(tmp_path, NCP_NAMES, named)
    assert line == (
        "duplicate: model.fusion_norm_alpha [] and wrapper.fusion_norm_alpha [1] are both model.fusion_norm_alpha []"
    )


def test_every_tensor_is_listed_however_many(tmp_path):
    """The released names where the native ones should be."""
    lines = problems(tmp_path, NATIVE_NAMES, random_tensors(NCP_NAMES))
    split, fused = 4 * 9, 4 * 6 + 4  # tensors of 4 layers under other names; embedding, head and final norms
    assert sum(line.startswith("unexpected") for line in lines) == split + 4
    assert sum(line.startswith("missing") for line in lines) == fused


@pytest.mark.parametrize("prefix", ["", "module.", "model.module."])
def test_prefixes_and_extra_state_are_passed_over(tmp_path, prefix):
    named = {prefix + name: value for name, value in random_tensors(NATIVE_NAMES).items()}
    named[f"{prefix}encoder.layers.0.self_attention._extra_state"] = np.zeros(3, np.uint8)
    found = match(NATIVE_NAMES, opened(tmp_path, named))
    assert found["fusion_tok_norm.bias"] == f"{prefix}fusion_tok_norm.bias"
    assert len(found) == len(NATIVE_NAMES.tensors)


@pytest.mark.parametrize("dtype", [np.float64, np.int8, ml_dtypes.float8_e4m3fn])
def test_dtypes_without_weights_are_refused_by_name(tmp_path, dtype):
    named = random_tensors(NAMES)
    named["model.norm.weight"] = np.zeros(16, dtype)
    with pytest.raises(HFError, match=rf"1 tensors .*\n  model.norm.weight {np.dtype(dtype).name}\[16\]$"):
        load_leaves(NAMES, opened(tmp_path, named), places(NAMES))


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loads_each_stored_dtype_into_each(tmp_path, stored, dtype):
    named = random_tensors(NAMES, stored)
    leaves = load_leaves(NAMES, opened(tmp_path, named), places(NAMES), jnp.dtype(dtype))
    assert {leaf.dtype.name for leaf in leaves.values()} == {dtype}
    theirs = named["model.layers.2.self_attn.q_proj.weight"].astype(dtype)
    np.testing.assert_array_equal(np.asarray(leaves["blocks/wq"][2]), theirs.T.reshape(16, 4, 4))


MESHES = [MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(fsdp=8), MeshConfig(data=8)]


@pytest.mark.parametrize("mesh", MESHES, ids=MeshConfig.describe)
@pytest.mark.parametrize("names", [NCP_NAMES, NATIVE_NAMES], ids=["split", "fused"])
def test_device_assembly_on_any_mesh_equals_host_assembly(tmp_path, mesh, names):
    files, mesh = opened(tmp_path, random_tensors(names)), make_mesh(mesh)
    host = load_leaves(names, files, places(names))

    def sharding(shape):
        """Every dimension that divides, the first one included: segments are split, too."""
        axes = iter(["tensor", "fsdp"])
        spec = [next((axis for axis in axes if size % mesh.shape[axis] == 0), None) for size in shape]
        return NamedSharding(mesh, PartitionSpec(*spec))

    shardings = {leaf: sharding(shape) for leaf, shape in names.leaves().items()}
    device = load_leaves(names, files, shardings, buffer_bytes=0)
    for leaf, array in host.items():
        assert device[leaf].sharding == shardings[leaf], leaf
        np.testing.assert_array_equal(np.asarray(device[leaf]), np.asarray(array), err_msg=leaf)


def test_loaded_arrays_do_not_follow_their_files(tmp_path):
    named = random_tensors(NAMES)
    leaves = load_leaves(NAMES, opened(tmp_path, named), places(NAMES), buffer_bytes=0)
    for file in tmp_path.glob("*.safetensors"):
        with open(file, "r+b") as other:
            other.seek(-200, 2)
            other.write(bytes(200))
    np.testing.assert_array_equal(np.asarray(leaves["embed/table"]), named["model.embed_tokens.weight"])
    np.testing.assert_array_equal(np.asarray(leaves["final_norm/scale"]), named["model.norm.weight"])


def test_non_contiguous_arrays_are_written_by_value(tmp_path):
    named = random_tensors(NAMES)
    files = opened(tmp_path, named)
    leaves = {leaf: np.asfortranarray(array) for leaf, array in load_leaves(NAMES, files, places(NAMES)).items()}
    leaves["embed/table"] = np.repeat(leaves["embed/table"], 2, axis=0)[::2]
    assert not leaves["blocks/wq"].flags.c_contiguous
    new = tmp_path / "new"
    new.mkdir()
    writer = TensorWriter(new, {tensor.name: tensor.shape for tensor in NAMES.tensors}, np.float32)
    save_leaves(NAMES, writer, [leaves])
    written = TensorFiles(new)
    for name, value in named.items():
        assert written.array(name).tobytes() == value.tobytes(), name


def test_rounding_is_reported_by_name(tmp_path):
    exact = {leaf: np.full(shape, 1.5, np.float32) for leaf, shape in NAMES.leaves().items()}
    exact["blocks/w_up"][1, 3, 4] = 1.5 + 2**-10  # bfloat16 has 7 bits behind the point
    writer = TensorWriter(tmp_path, {tensor.name: tensor.shape for tensor in NAMES.tensors}, ml_dtypes.bfloat16)
    written = save_leaves(NAMES, writer, [exact])
    assert written.rounded == ("model.layers.1.mlp.up_proj.weight",)
    assert (written.tensors, written.parameters) == (len(NAMES.tensors), NAMES.parameters)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_norm/scale": None}, "needs leaves that are not there: final_norm/scale"),
        ({"final_norm/scale": np.zeros(17, np.float32)}, r"final_norm/scale \[17\] .* which has \[16\]"),
        ({"other": np.zeros(1, np.float32)}, r"leaf other \[1\] .* no such leaf"),
    ],
)
def test_other_parameters_are_refused(tmp_path, change, message):
    leaves = {leaf: np.zeros(shape, np.float32) for leaf, shape in NAMES.leaves().items()} | change
    leaves = {leaf: array for leaf, array in leaves.items() if array is not None}
    writer = TensorWriter(tmp_path, {tensor.name: tensor.shape for tensor in NAMES.tensors}, np.float32)
    with pytest.raises(CheckpointMismatch, match=message):
        save_leaves(NAMES, writer, [leaves])


MEASURE = """
    import json, resource, sys
    import jax, jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding
    from ncp_jax.checkpoint.hf_files import TensorFiles
    from ncp_jax.checkpoint.hf_io import load_leaves
    from ncp_jax.checkpoint.hf_names import BlockSizes
    from ncp_jax.checkpoint.hf_ncp_names import olmo3_map

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

    names = olmo3_map(BlockSizes(1024, 8, 8, 4096, True), vocab=65_536, layers=6)
    here = SingleDeviceSharding(jax.local_devices()[0])
    small = jnp.zeros((3, 8, 8)).astype(jnp.bfloat16).block_until_ready()
    before = resident()
    leaves = load_leaves(names, TensorFiles(sys.argv[1]), dict.fromkeys(names.leaves(), here), jnp.float32)
    kept = sum(leaf.nbytes for leaf in leaves.values())
    # Not ru_maxrss: through fork it remembers the test process, which may have been larger.
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    peak = int(status["VmHWM"].split()[0]) * 1024
    print(json.dumps({"over": peak - before - kept, "kept": kept}))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's memory figures")
def test_loading_takes_less_than_twice_the_largest_tensor(tmp_path):
    """On CPU devices the parameters are host memory, too; what comes on top of them is the import's own."""
    names = olmo3_map(BlockSizes(1024, 8, 8, 4096, True), vocab=65_536, layers=6)
    TensorWriter(tmp_path, {tensor.name: tensor.shape for tensor in names.tensors}, ml_dtypes.bfloat16).finish()
    largest, buffers = 2 * 65_536 * 1024, 100e6  # the importer's 32 MB, compiled programs, freed pages of malloc
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path)], capture_output=True, text=True, check=True
    )
    figures = json.loads(run.stdout)
    assert figures["kept"] == 4 * names.parameters
    assert figures["over"] <= 2 * largest + buffers
