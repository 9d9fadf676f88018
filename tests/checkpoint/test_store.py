"""CheckpointStore: exact values, strictness, retention, and what is left after each kind of failure."""

import collections
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from ncp_jax.checkpoint import store as store_module
from ncp_jax.checkpoint.store import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointSaveError,
    CheckpointStore,
)

Adam = collections.namedtuple("Adam", "count mu nu")
META = {"config": {"model": {"layers": 2, "codes": 4}}, "position": 640, "seconds": 1.5}


def state(seed: int = 0, layers: int = 2, codes: int = 4) -> dict:
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "blocks": {"wq": jax.random.normal(keys[0], (layers, 8, 4))},
        "codebook": jax.random.normal(keys[1], (3, codes, 2)).astype(jnp.bfloat16),
        "unused": jnp.zeros((0, 4)),
    }
    moments = jax.tree.map(lambda x: x.astype(jnp.float32) * 0.5, params)
    return {
        "params": params,
        "opt_state": (Adam(jnp.int32(7), moments, None), ()),
        "step": jnp.int32(seed),
        "rng": jax.random.key_data(keys[2]),
    }


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def assert_bit_equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def saved(tmp_path):
    """A directory with checkpoints of steps 1 (best) and 2."""
    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(1, state(1), META, best=True)
        store.save(2, state(2), META)
    return tmp_path / "checkpoints"


def listing(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*"))


def test_every_leaf_comes_back_bit_equal(saved):
    store = CheckpointStore(saved)
    assert store.steps() == [1, 2]
    assert store.latest() == 2
    assert store.best_step() == 1
    assert_bit_equal(store.restore(2, abstract(state())), state(2))
    meta = store.meta(2)
    assert {key: meta[key] for key in META} == META
    assert len(meta["fingerprint"]) == 12


def test_stored_key_data_continues_the_random_stream(saved):
    data = CheckpointStore(saved).restore(2, abstract(state()))["rng"]
    expected = jax.random.split(jax.random.key(2), 3)[2]
    assert jax.random.bits(jax.random.wrap_key_data(data)) == jax.random.bits(expected)


def test_saved_arrays_may_be_donated_at_once(tmp_path):
    tree = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
    expected = np.array(tree["w"])
    with CheckpointStore(tmp_path) as store:
        store.save(1, tree, {})
        update = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
        jax.block_until_ready(update(update(tree)))
    np.testing.assert_array_equal(CheckpointStore(tmp_path).restore(1, abstract({"w": expected}))["w"], expected)


def test_abstract_describes_without_reading_arrays(saved):
    shutil.rmtree(saved / "2" / "state")
    described = CheckpointStore(saved).abstract(2)
    assert described["params"]["codebook"] == jax.ShapeDtypeStruct((3, 4, 2), jnp.bfloat16)
    assert described["opt_state"]["0"]["mu"]["blocks"]["wq"].shape == (2, 8, 4)


def test_subtree_restores_parameters_alone(saved):
    store = CheckpointStore(saved)
    params = {"params": state(2)["params"]}
    assert_bit_equal(store.restore_subtree(2, ["params"], abstract(params)), params)
    bigger = {"params": state(2, layers=3)["params"]}
    with pytest.raises(CheckpointMismatch, match=r"float32\[3, 8, 4\]"):
        store.restore_subtree(2, ["params"], abstract(bigger))
    with pytest.raises(CheckpointMismatch, match="'ema'; it has opt_state, params, rng, step"):
        store.restore_subtree(2, ["ema"], {"ema": abstract(state()["params"])})


def test_another_layer_or_codebook_is_refused_with_both_shapes_and_the_config(saved):
    config = {"model": {"layers": 3, "codes": 4}}
    with pytest.raises(CheckpointMismatch) as refused:
        CheckpointStore(saved).restore(2, abstract(state(layers=3)), config=config)
    for part in ("params/blocks/wq", "float32[3, 8, 4]", "float32[2, 8, 4]", "model.layers: 3 -> 2"):
        assert part in str(refused.value)
    assert "params/codebook" not in str(refused.value)
    assert "model.codes" not in str(refused.value)
    with pytest.raises(CheckpointMismatch, match=r"params/codebook is bfloat16\[3, 8, 2\] here"):
        CheckpointStore(saved).restore(2, abstract(state(codes=8)))


def test_missing_and_unexpected_leaves_are_refused(saved):
    tree = state()
    tree["params"]["extra"] = jnp.zeros(2)
    del tree["rng"]
    with pytest.raises(CheckpointMismatch) as refused:
        CheckpointStore(saved).restore(2, abstract(tree))
    assert "missing from the checkpoint: params/extra float32[2]" in str(refused.value)
    assert "only in the checkpoint: rng uint32[2]" in str(refused.value)


def test_another_dtype_is_refused_not_cast(saved):
    tree = jax.tree.map(lambda x: jnp.bfloat16 if x.dtype == jnp.float32 else x.dtype, state())
    cast = jax.tree.map(lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype), state(), tree)
    with pytest.raises(CheckpointMismatch, match=r"mu/blocks/wq is bfloat16\[2, 8, 4\] here, float32"):
        CheckpointStore(saved).restore(2, cast)


def test_what_is_not_a_jax_array_is_refused_before_writing(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="'w' is a ndarray"):
        store.save(1, {"w": np.zeros(2)}, {})
    assert not (tmp_path / "checkpoints").exists()


def test_newest_and_best_are_kept(tmp_path):
    with CheckpointStore(tmp_path, keep=2) as store:
        for step in range(1, 6):
            store.save(step, {"w": jnp.full(3, step)}, {}, best=step in (1, 2))
            store.wait()
            assert store.latest() == step
        assert store.steps() == [2, 4, 5]
        assert store.best_step() == 2
        store.save(6, {"w": jnp.full(3, 6)}, {}, best=True)
        store.wait()
        assert store.steps() == [5, 6]
        assert store.best_step() == 6
    np.testing.assert_array_equal(CheckpointStore(tmp_path).restore(6, store.abstract(6))["w"], np.full(3, 6))


def test_without_best_only_the_newest_are_kept(tmp_path):
    with CheckpointStore(tmp_path, keep=1, best=False, asynchronous=False) as store:
        for step in (1, 2):
            store.save(step, {"w": jnp.zeros(1)}, {}, best=step == 1)
            assert store.steps() == [step], "a synchronous save has committed when it returns"


def test_a_stored_step_is_not_written_again_but_can_become_best(saved):
    before = (saved / "2" / "meta" / "metadata").stat().st_mtime_ns
    with CheckpointStore(saved) as store:
        store.save(2, state(9), META, best=True)
        store.save(2, state(9), META)
        assert store.best_step() == 2
        assert_bit_equal(store.restore(2, abstract(state())), state(2))
    assert (saved / "2" / "meta" / "metadata").stat().st_mtime_ns == before


@pytest.mark.parametrize("markers", [True, False])
def test_a_copy_opens_and_opening_deletes_nothing(saved, tmp_path, markers):
    copy = tmp_path / "copied elsewhere"
    subprocess.run(["cp", "-r", saved, copy], check=True)
    (copy / "3.orbax-checkpoint-tmp").mkdir()
    if not markers:
        for file in [*copy.rglob("commit_success.txt"), *copy.rglob("_CHECKPOINT_METADATA")]:
            file.unlink()
    before = listing(copy)
    with CheckpointStore(copy, keep=1) as store:
        assert store.steps() == [1, 2]
        assert_bit_equal(store.restore(1, abstract(state())), state(1))
    assert listing(copy) == before


def test_an_absent_directory_is_empty_and_stays_absent(tmp_path):
    store = CheckpointStore(tmp_path / "typo")
    assert store.steps() == []
    assert store.latest() is None
    assert store.best_step() is None
    with pytest.raises(CheckpointError, match=r"step 5 in .*typo; steps there: none"):
        store.restore(5, {})
    assert not (tmp_path / "typo").exists()


def test_one_flipped_bit_in_the_values_is_found(tmp_path):
    """Orbax alone returns such values without a word."""
    tree = {"w": jax.random.normal(jax.random.key(0), (128, 128)), "n": jnp.int32(1)}
    with CheckpointStore(tmp_path) as store:
        store.save(1, tree, {})
        store.save(2, tree, {})
    data = max((tmp_path / "2" / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 0x10
    data.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="the values of 1 leaves are not the saved ones: w") as damaged:
        store.restore(2, abstract(tree))
    assert f"Untouched: {tmp_path}/1" in str(damaged.value)
    assert_bit_equal(store.restore_subtree(2, ["n"], {"n": abstract(tree["n"])}), {"n": tree["n"]})


def test_unreadable_files_are_damage(saved):
    (saved / "2" / "meta" / "metadata").write_text('{"format": 1, "me')
    with pytest.raises(CheckpointDamaged, match="meta/metadata cannot be read"):
        CheckpointStore(saved).meta(2)
    for file in (saved / "1" / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(CheckpointDamaged, match="arrays cannot be read"):
        CheckpointStore(saved).restore(1, abstract(state()))


def test_a_failed_background_save_surfaces_once_and_harms_nothing(saved, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    with CheckpointStore(saved, keep=1) as store:
        monkeypatch.setattr(ocp.AsyncCheckpointer, "wait_until_finished", no_space)
        store._writer = store._make_writer()
        monkeypatch.setattr(store._writer, "save", lambda *_, **__: None)
        store.save(3, state(3), META, best=True)
        store._thread.join()
        with pytest.raises(CheckpointSaveError) as failed:
            store.check()
        for part in ("step 3", "No space left on device", f"Untouched: {saved}/2", "[1, 2]"):
            assert part in str(failed.value)
        store.check()
        monkeypatch.undo()
        assert store.steps() == [1, 2]
        assert store.best_step() == 1
        store.save(3, state(3), META)
    assert CheckpointStore(saved).steps() == [1, 3]


def run(script: str, *arguments: object, devices: int = 1) -> subprocess.CompletedProcess:
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


FULL_DISK = """
    import resource, sys
    import jax
    from ncp_jax.checkpoint.store import CheckpointStore, CheckpointSaveError
    small, big = {"w": jax.numpy.ones(4)}, {"w": jax.random.normal(jax.random.key(0), (1 << 20,))}
    store = CheckpointStore(sys.argv[1], keep=1)
    store.save(1, small, {})
    store.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # writes beyond 1 MiB fail, as on a full disk
    try:
        store.save(2, big, {})
        store.wait()
    except CheckpointSaveError as error:
        print("REFUSED", error)
    print(store.steps(), store.restore(1, store.abstract(1))["w"])
"""


def test_a_disk_that_refuses_writes_leaves_the_earlier_checkpoint(tmp_path):
    done = run(FULL_DISK, tmp_path / "checkpoints")
    assert "REFUSED saving step 2" in done.stdout, done.stdout + done.stderr
    assert f"Untouched: {tmp_path}/checkpoints/1" in done.stdout
    assert "[1] [1. 1. 1. 1.]" in done.stdout


KILLED = """
    import os, signal, sys, threading
    import jax
    from ncp_jax.checkpoint.store import CheckpointStore
    store = CheckpointStore(sys.argv[1], keep=1)
    store.save(1, {"w": jax.numpy.ones(4)}, {}, best=False)
    store.wait()
    big = {"w": jax.random.normal(jax.random.key(0), (1 << 23,))}
    store.save(2, big, {}, best=True)
    print("in flight", store.steps(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_in_the_middle_of_a_save_leaves_the_earlier_checkpoint(tmp_path):
    done = run(KILLED, tmp_path)
    assert done.returncode == -9, done.stdout + done.stderr
    assert "in flight [1]" in done.stdout
    left = listing(tmp_path)
    assert any("2.orbax-checkpoint-tmp" in name for name in left), "the kill came too late to prove anything"
    with CheckpointStore(tmp_path, keep=1) as store:
        assert store.steps() == [1]
        assert store.best_step() is None
        assert listing(tmp_path) == left
        np.testing.assert_array_equal(store.restore(1, store.abstract(1))["w"], np.ones(4))
        store.save(2, {"w": jnp.full(4, 2)}, {})
    assert store.steps() == [2]
    assert not any("tmp" in name for name in listing(tmp_path))


def test_kill_while_an_old_checkpoint_is_deleted_never_shows_half_of_it(saved, monkeypatch):
    """Deletion stops at its first file, as a kill would: what is left must not be listed as a checkpoint."""
    monkeypatch.setattr(type(store_module.epath.Path("x")), "rmtree", lambda *_, **__: None)
    with CheckpointStore(saved, keep=1, best=False) as store:
        store.save(3, state(3), META)
        store.wait()
        assert store.steps() == [3]


RESHARD = """
    import hashlib, sys
    import jax, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from ncp_jax.checkpoint.store import CheckpointStore
    directory, devices, action = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    kind = AxisType.Explicit if action == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((devices // 2 or 1, min(devices, 2)), ("fsdp", "tensor"), axis_types=(kind, kind))
    specs = {"a": P("fsdp", "tensor"), "b": P(None, "fsdp"), "c": P(), "n": P()}
    keys = jax.random.split(jax.random.key(0), 3)
    values = {"a": jax.random.normal(keys[0], (16, 6)), "b": jax.random.normal(keys[1], (3, 8)).astype("bfloat16"),
              "c": jax.random.bits(keys[2], (5,)), "n": jax.numpy.int32(3)}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    store = CheckpointStore(directory)
    with jax.set_mesh(mesh):
        if action == "save":
            store.save(4, jax.device_put(values, shardings), {})
            store.close()
        abstract = {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=shardings[n]) for n, v in values.items()}
        tree = store.restore(4, abstract)
    assert all(tree[name].sharding == shardings[name] for name in tree)
    single = store.restore(4, store.abstract(4))
    assert all(len(leaf.devices()) == 1 for leaf in single.values())
    for name in sorted(tree):
        for leaf in (tree[name], single[name]):
            print(name, hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest())
"""


def test_eight_devices_restore_onto_four_and_one(tmp_path):
    hashes = []
    for devices, action in ((8, "save"), (4, "auto"), (4, "explicit"), (1, "auto")):
        done = run(RESHARD, tmp_path, devices, action, devices=devices)
        assert done.returncode == 0, done.stderr[-3000:]
        hashes.append(done.stdout)
    assert len(set(hashes)) == 1
    assert len(hashes[0].splitlines()) == 8
