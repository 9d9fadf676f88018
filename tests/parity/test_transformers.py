"""Exported OLMo-3 models inside transformers: the same logits beyond the window, and the same files back.

Needs the extra `parity` (torch, transformers).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'parity': torch")
transformers = pytest.importorskip("transformers", reason="needs the extra 'parity': transformers")

from ncp_jax.convert.formats import SpecialIds  # noqa: E402  below the skip
from ncp_jax.convert.pretrained import Export, load_pretrained, save_pretrained  # noqa: E402
from ncp_jax.data.tokenizer import train_bpe  # noqa: E402
from ncp_jax.models.olmo3 import Olmo3, Olmo3Config  # noqa: E402
from ncp_jax.nn.backbone import Backbone, Yarn  # noqa: E402
from ncp_jax.parallel.rules import unboxed  # noqa: E402

WINDOW, LENGTH, VOCAB = 8, 64, 300
PLAIN = Olmo3Config(
    vocab=VOCAB, layers=8, backbone=Backbone(width=64, heads=4, ffn=96, window=WINDOW, full_every=4, rope_theta=1e4)
)


def with_backbone(**changes) -> Olmo3Config:
    return dataclasses.replace(PLAIN, backbone=dataclasses.replace(PLAIN.backbone, **changes))


# YaRN's original length is a quarter of the rows; the stated factor 1.0 is not YaRN's own 1.139.
CONFIGS = {
    "plain": PLAIN,
    "grouped heads": with_backbone(kv_heads=2, full_every=2),
    "yarn": with_backbone(yarn=Yarn(4.0, 16)),
    "yarn, stated factor": with_backbone(yarn=Yarn(4.0, 16, attention_factor=1.0)),
    "unwindowed": with_backbone(window=None),
}


def random_params(config: Olmo3Config) -> dict:
    """First values, and norm scales that are not ones."""
    random = np.random.default_rng(0)
    params = unboxed(jax.jit(Olmo3(config).init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"])

    def changed(path, leaf):
        scale = "norm" in jax.tree_util.keystr(path)
        return leaf + jnp.asarray(0.3 * random.standard_normal(leaf.shape), leaf.dtype) if scale else leaf

    return jax.tree_util.tree_map_with_path(changed, params)


def our_logits(config, params, ids):
    model = Olmo3(config)
    return np.asarray(jax.jit(lambda p, i: model.apply({"params": p}, i, method="logits"))(params, ids))


def load_theirs(folder):
    """The model, after transformers found each tensor and no other."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert type(model).__name__ == "Olmo3ForCausalLM"
    assert not any(found.values()), found
    return model.eval()


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(1).integers(0, VOCAB, (2, LENGTH))


@pytest.fixture(scope="module", params=CONFIGS)
def exported(request, tmp_path_factory):
    """(config, parameters, folder)."""
    config, folder = CONFIGS[request.param], tmp_path_factory.mktemp("export") / "olmo3"
    params = random_params(config)
    save_pretrained(folder, config, params, Export(dtype="float32", ids=SpecialIds(eos=(2,), pad=0), positions=64))
    return config, params, folder


def test_logits_beyond_the_window(exported, ids):
    config, params, folder = exported
    with torch.no_grad():
        theirs = load_theirs(folder)(torch.tensor(ids)).logits.numpy()
    ours = our_logits(config, params, ids)
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    beyond = slice(2 * WINDOW, None)
    if config.backbone.window:  # a key more or less would show here
        other = dataclasses.replace(config, backbone=dataclasses.replace(config.backbone, window=WINDOW + 1))
        assert np.abs(our_logits(other, params, ids) - theirs)[:, beyond].max() > 1e-2
    if config.backbone.yarn:  # and so would YaRN's absence
        other = dataclasses.replace(config, backbone=dataclasses.replace(config.backbone, yarn=None))
        assert np.abs(our_logits(other, params, ids) - theirs)[:, beyond].max() > 1e-2


def test_rotary_tables_per_layer_type(exported):
    """YaRN on full layers alone, whatever the version does by default."""
    config, _, folder = exported
    rotary = load_theirs(folder).model.rotary_emb
    plain = 1e4 ** (-np.arange(0, 16, 2) / 16)
    if config.backbone.window:
        np.testing.assert_allclose(rotary.sliding_attention_inv_freq.numpy(), plain, rtol=1e-6)
    full = rotary.full_attention_inv_freq.numpy()
    y = config.backbone.yarn
    assert np.allclose(full, plain, rtol=1e-6) == (y is None)
    stated = 1.0 if y is None or y.attention_factor else 0.1 * np.log(4.0) + 1
    assert rotary.full_attention_attention_scaling == pytest.approx(stated)


def test_special_tokens_are_not_left_to_defaults(exported):
    model = load_theirs(exported[2])
    for settings in (model.config, model.generation_config):
        assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (None, 2, 0)
    assert model.config.tie_word_embeddings is False
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight


def test_what_transformers_saves_is_read(exported, tmp_path):
    """Import alone, in the spelling of this version."""
    config, params, folder = exported
    load_theirs(folder).save_pretrained(tmp_path)
    back = load_pretrained(tmp_path)
    assert back.config == config
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(back.params), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_generation_stops_at_the_end_token(tmp_path, ids):
    """A model whose every next token is the end: one new token, by the exported settings alone."""
    params = random_params(PLAIN)
    params["head"]["kernel"] = jnp.zeros_like(params["head"]["kernel"])
    params["final_norm"]["scale"] = jnp.zeros_like(params["final_norm"]["scale"])  # logits are all 0: the first wins
    save_pretrained(tmp_path / "olmo3", PLAIN, params, Export(dtype="float32", ids=SpecialIds(eos=(0,)), positions=64))
    out = load_theirs(tmp_path / "olmo3").generate(torch.tensor(ids[:1, :5] + 0), max_new_tokens=9, do_sample=False)
    assert out.shape[1] == 6


def test_the_tokenizer_travels(tmp_path):
    from ncp_jax.convert.tokenizers import own_companions, own_ids

    tokenizer = train_bpe(["the whale swam past the ship"] * 9, VOCAB)
    ids = own_ids(tokenizer)
    files = {"tokenizer.json": tokenizer.content, **own_companions(tokenizer, ids, 64)}
    save_pretrained(tmp_path / "olmo3", PLAIN, random_params(PLAIN), Export(ids=ids, tokenizer=files))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "olmo3")
    text = "a whale — naïve\n  swam"
    assert theirs.encode(text) == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert (theirs.eos_token_id, theirs.model_max_length) == (tokenizer.eos, 64)
