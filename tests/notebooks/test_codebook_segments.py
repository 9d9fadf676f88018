"""The codebook notebook runs from its first cell to its last on a tiny run, and draws its pictures."""

import base64
import os
from pathlib import Path

import numpy as np
import pytest
from models_for_tests import random_params

from ncp_jax.checkpoint.store import CheckpointStore
from ncp_jax.config import to_dict
from ncp_jax.data.config import DataConfig, Source
from ncp_jax.data.prepare import Options, prepare
from ncp_jax.models.ncp.config import Concept, NCPConfig
from ncp_jax.models.ncp.model import NCP
from ncp_jax.nn.backbone import Backbone
from ncp_jax.optim.config import OptimConfig
from ncp_jax.train.run_config import RunConfig, TrainConfig
from ncp_jax.train.rundir import RunDirectory

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "codebook_segments.ipynb"
PICTURES = 5
WORDS = ["the", "whale", "swam", "past", "an", "old", "ship", "and", "sang", "about", "rope", "while", "rain", "fell"]


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory) -> Path:
    """A run of a minute NCP model on a few kilobytes of random sentences, with random weights in place of training."""
    place = tmp_path_factory.mktemp("notebook")
    random = np.random.default_rng(0)
    for number in range(40):
        (place / f"{number}.txt").write_text(" ".join(random.choice(WORDS, 120)))
    prepare([str(place)], Options(out=str(place / "corpus"), train_bpe=280, val_fraction=0.3))
    config = RunConfig(
        name="tiny",
        model=NCPConfig(
            vocab=280, encoder_layers=2, concept_layers=1, decoder_layers=1,
            backbone=Backbone(width=16, heads=2, ffn=24, window=32, rope_theta=1e4),
            concept=Concept(segments=4, codes=6, window=8),
        ),
        data=DataConfig(mixture=(Source(str(place / "corpus")),), sequence=32),
        optim=OptimConfig(), train=TrainConfig(batch=8, steps=2), workdir=str(place / "run"),
    )  # fmt: skip
    run = RunDirectory(config.directory)
    with run.locked(), CheckpointStore(run.checkpoints) as checkpoints:
        run.write_config(config, (place / "corpus" / "tokenizer.json").read_bytes(), eos=0)
        weights = random_params(NCP(config.model))
        checkpoints.save(2, {"train": {"params": weights}}, {"config": to_dict(config)}, best=True)
    return run.path


def test_the_notebook_runs_from_end_to_end(run_directory, tmp_path, monkeypatch):
    monkeypatch.setenv("NCP_RUN", str(run_directory))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()

    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output["data"]["image/png"] for output in shown if "image/png" in output.get("data", {})]
    assert len(pictures) == PICTURES
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    summary = notebook.cells[-1].outputs[0]["data"]["text/markdown"]
    assert "On **tiny** at step 2 (512 training tokens)" in summary
    assert "nan" not in summary


def test_the_notebook_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
