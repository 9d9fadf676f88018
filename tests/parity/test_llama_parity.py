"""LLaMA models inside transformers, and torch's own files: the same logits, the same files back.

Needs the extra `parity` (torch, transformers).
"""

import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'parity': torch")
transformers = pytest.importorskip("transformers", reason="needs the extra 'parity': transformers")

from ncp_jax.checkpoint.hf_tensor import HFError  # noqa: E402  below the skip
from ncp_jax.checkpoint.hf_torch import CONVERT  # noqa: E402
from ncp_jax.config import ConfigError  # noqa: E402
from ncp_jax.convert.formats import SpecialIds  # noqa: E402
from ncp_jax.convert.pretrained import Export, load_pretrained, save_pretrained  # noqa: E402
from ncp_jax.models.llama import Llama, LlamaConfig  # noqa: E402
from ncp_jax.nn.llama_block import LlamaBackbone  # noqa: E402
from ncp_jax.parallel.rules import unboxed  # noqa: E402

VOCAB, LENGTH = 300, 48
CONFIGS = {
    "plain": LlamaConfig(VOCAB, 3, LlamaBackbone(64, 4, 96)),
    "grouped heads": LlamaConfig(VOCAB, 2, LlamaBackbone(64, 4, 96, kv_heads=2, rope_theta=5e5, eps=1e-5)),
}


def random_params(config: LlamaConfig) -> dict:
    """First values larger than usual, and norm scales that are not ones."""
    random = np.random.default_rng(0)
    shapes = unboxed(jax.eval_shape(Llama(config).init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"])

    def value(path, leaf):
        centre = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(centre + 0.1 * random.standard_normal(leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(value, shapes)


def load_theirs(folder):
    """The model, after transformers found each tensor and no other."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not any(found.values()), found
    return model.eval()


@pytest.fixture(scope="module", params=CONFIGS)
def exported(request, tmp_path_factory):
    """(config, parameters, folder)."""
    config, folder = CONFIGS[request.param], tmp_path_factory.mktemp("export") / "llama"
    params = random_params(config)
    save_pretrained(folder, config, params, Export(dtype="float32", ids=SpecialIds(1, (2,), 0), positions=64))
    return config, params, folder


def assert_same(loaded, config, params):
    assert loaded.config == config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


def test_logits(exported):
    config, params, folder = exported
    ids = np.random.default_rng(1).integers(0, VOCAB, (2, LENGTH))
    with torch.no_grad():
        theirs = load_theirs(folder)(torch.tensor(ids)).logits.numpy()
    ours = jax.jit(lambda p: Llama(config).apply({"params": p}, ids, method="logits"))(params)
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    assert theirs.std() > 0.1


def test_what_transformers_saves_is_read(exported, tmp_path):
    config, params, folder = exported
    model = load_theirs(folder)
    assert (model.config.eos_token_id, model.config.pad_token_id, model.config.tie_word_embeddings) == (2, 0, False)
    model.save_pretrained(tmp_path)
    assert_same(load_pretrained(tmp_path), config, params)


def test_what_torch_saves_is_read(exported, tmp_path):
    """A state dict with its modules' versions, parameters, bfloat16, and a file of torch before 1.6."""
    config, params, folder = exported
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")
    model, file = load_theirs(folder), tmp_path / "pytorch_model.bin"
    for state in (model.state_dict(), dict(model.named_parameters())):
        torch.save(state, file)
        assert_same(load_pretrained(tmp_path), config, params)
    torch.save(model.to(torch.bfloat16).state_dict(), file)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert_same(load_pretrained(tmp_path), config, rounded)
    torch.save(model.state_dict(), file, _use_new_zipfile_serialization=False)
    with pytest.raises(HFError, match=r"no zip archive: .* convert it"):
        load_pretrained(tmp_path)


def test_the_advice_of_a_refusal_works(exported, tmp_path):
    """The printed command turns shards with tied weights into what is read."""
    config, params, folder = exported
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")
    state = load_theirs(folder).state_dict()
    for number, names in enumerate((list(state)[::2], list(state)[1::2])):
        part = {name: state[name] for name in names}
        torch.save(part, tmp_path / f"pytorch_model-{number}.bin", _use_new_zipfile_serialization=False)
    command = "python -c" + CONVERT.partition("python -c")[2]
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, cwd=tmp_path, check=True)
    assert_same(load_pretrained(tmp_path), config, params)


def test_tied_models_are_refused(exported, tmp_path):
    """Their head is the table: the official baseline has one of its own."""
    model = load_theirs(exported[2])
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    with pytest.raises(ConfigError, match="tie_word_embeddings is True; it must be False"):
        load_pretrained(tmp_path)
