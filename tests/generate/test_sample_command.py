"""`ncp-jax sample` for every family: defaults, options that mean nothing, what is said on stderr."""

from types import SimpleNamespace

import pytest
from models_for_tests import presets, random_params

from ncp_jax.cli.main import main
from ncp_jax.data.tokenizer import train_bpe
from ncp_jax.generate.calm import CalmEngine
from ncp_jax.models.calm.autoencoder import Autoencoder
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig, EnergyHead
from ncp_jax.models.calm.model import Calm
from ncp_jax.models.llama import Llama, LlamaConfig
from ncp_jax.nn.llama_block import LlamaBackbone
from ncp_jax.train import loaded

TOKENIZER = train_bpe(["the whale and the ship saw the sea"] * 3, 260)
SIZE = TOKENIZER.size
BACKBONE = LlamaBackbone(16, 4, 24)
AE = AutoencoderConfig(SIZE + 1, 2, 12, 20, 6, pad=SIZE)
CONFIGS = {
    "calm": CalmConfig(1, BACKBONE, AE, head=EnergyHead(1, 4)),
    "llama": LlamaConfig(SIZE, 1, BACKBONE),
    "calm_autoencoder": AE,
    "ncp": presets()["released"],
}


@pytest.fixture
def runs(monkeypatch):
    """Runs that hold random models, named after their families."""

    def load_run(name, step):
        config = CONFIGS[name]
        model = {"calm": Calm, "llama": Llama}.get(name)
        params = random_params(model(config)) if name == "llama" else None
        frozen = None
        if name == "calm":
            params, frozen = chunk_params(model(config)), chunk_params(Autoencoder(AE))
        task = SimpleNamespace(forward=None if name.startswith("calm") else len, name=name)
        return loaded.LoadedRun(SimpleNamespace(model=config), task, params, frozen, TOKENIZER, 1)

    monkeypatch.setattr(loaded, "load_run", load_run)


def chunk_params(model):
    return random_params(SimpleNamespace(init=lambda key, tokens: model.init(key, tokens.reshape(1, -1, 2))))


def sample(*arguments):
    return main(["sample", *arguments])


def test_a_calm_run_is_sampled_by_vote_at_one_half(runs, capsys, monkeypatch):
    seen, real = [], CalmEngine.stream

    def stream(self, prompts, *, how, **options):
        seen.append(how)
        return real(self, prompts, how=how, **options)

    monkeypatch.setattr(CalmEngine, "stream", stream)
    assert sample("calm", "the whale", "--tokens", "6", "--candidates", "8") == 0
    said = capsys.readouterr()
    assert said.out.startswith("the whale")
    assert (seen[0].temperature, seen[0].method, seen[0].candidates, seen[0].max_draws) == (0.5, "vote", 8, 10_000)
    rest = len(TOKENIZER.encode("the whale")) % 2
    assert ("tokens left out at the prompt's start: 1 (--partial trim)" in said.err) == bool(rest)
    assert "8.0 draws per chunk of 2 tokens, 0% of 3 chunks exactly at temperature 0.5" in said.err


def test_one_draw_at_temperature_one(runs, capsys):
    assert sample("calm", "the whale", "--tokens", "4", "--temperature", "1", "--method", "exact") == 0
    assert "1.0 draws per chunk of 2 tokens, 100% of 2 chunks exactly at temperature 1" in capsys.readouterr().err


def test_the_baseline_is_sampled_token_by_token(runs, capsys):
    assert sample("llama", "the whale", "--tokens", "5", "--top-k", "3") == 0
    said = capsys.readouterr()
    assert said.out.startswith("the whale")
    assert len(said.out) > len("the whale\n")
    assert said.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calm", "the whale", "--top-k", "5"], "--top-k does not apply to a 'calm' model: it draws whole chunks"),
        (["calm", "the whale", "--min-p", "0.1"], "--min-p does not apply"),
        (["calm", "the whale", "--history", "encoder"], "--history does not apply to a 'calm' model: only NCP"),
        (["calm", "the whale", "--temperature", "0.8"], "temperature 0.8 is not 1/n"),
        (["calm", "the whale", "--temperature", "0"], "temperature 0.0 cannot be had from draws"),
        (["calm", "the whale", "--candidates", "0"], "candidates must be at least 1, got 0"),
        (["calm", "t"], "prompt 0 has 1 tokens and a chunk has 2"),
        (["calm", ""], "the prompt is empty"),
        (["calm", "the whale", "--tokens", "0"], "asked for 0 new tokens"),
        (["llama", "the whale", "--method", "vote"], "--method does not apply to a 'llama' model: it draws token"),
        (["llama", "the whale", "--max-draws", "9"], "--max-draws does not apply"),
        (["llama", "the whale", "--partial", "trim"], "--partial does not apply"),
        (["llama", "the whale", "--history", "predicted"], "--history does not apply to a 'llama' model: only NCP"),
        (["ncp", "the whale", "--candidates", "9"], "--candidates does not apply to a 'ncp' model"),
        (["calm_autoencoder", "the whale"], "is an autoencoder: it turns chunks into latents and back"),
    ],
)
def test_refusals(runs, capsys, arguments, message):
    assert sample(*arguments) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
