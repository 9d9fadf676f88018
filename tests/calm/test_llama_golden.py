"""The autoregressive baseline against transformers' LlamaForCausalLM."""

import dataclasses

import jax
import numpy as np
import pytest
from calm_golden import llama
from golden_files import load

from ncp_jax.models.llama import Llama
from ncp_jax.ops.cross_entropy import linear_cross_entropy


@pytest.mark.parametrize("name", ["v67", "v5"])
@pytest.mark.parametrize("scan", [True, False])
def test_logits_and_loss(name, scan):
    golden = load(f"calm_ar_{name}")
    config, params = llama(golden)
    model, ids = Llama(dataclasses.replace(config, scan=scan)), golden["input_ids"]

    @jax.jit
    def run(params):
        out = model.apply({"params": params}, ids).out_BTD[:, :-1]
        token = linear_cross_entropy(out, params["head"]["kernel"], ids[:, 1:], np.ones_like(ids[:, 1:], bool))
        return model.apply({"params": params}, ids, method="logits"), token.nll / ids[:, 1:].size

    logits, loss = run(params)
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)
    np.testing.assert_allclose(loss, golden["loss"], rtol=1e-3)
