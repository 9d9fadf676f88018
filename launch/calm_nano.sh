#!/usr/bin/env bash
# CALM end to end on the bundled text: an autoencoder of chunks, a language model on its latents, the next-token
# baseline, BrierLM of both with errors at every checkpoint, samples, and a report that plots score against training
# FLOPs. Half an hour on two quiet CPU cores.
#
#   bash launch/calm_nano.sh
#
# Run it again and it goes on where it stopped. Everything it makes lies under corpora/ and runs/.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

corpus="corpora/tiny" prompt="The captain looked at the sea and the ship"

say() { printf '\n== %s\n' "$*"; }

say "1/6 environment"
use_environment report
say "2/6 data"
ncp-jax data prepare launch/tiny_corpus/tiny_corpus.jsonl --out "$corpus" --train-bpe 4096 \
    --split-file launch/tiny_corpus/split.json
say "3/6 autoencoder, language model on its latents, next-token baseline"
for config in calm_autoencoder_nano calm_nano calm_baseline_nano; do
    ncp-jax train "configs/$config.py"
done
say "4/6 BrierLM at every checkpoint, on the same held-out positions"
ncp-jax brierlm runs/calm_nano runs/calm_baseline_nano --step all
say "5/6 samples at temperature 1 and 1/3"
for temperature in 1 0.333333; do
    ncp-jax sample runs/calm_nano "$prompt" --tokens 60 --temperature "$temperature" --method vote
    ncp-jax sample runs/calm_baseline_nano "$prompt" --tokens 60 --temperature "$temperature"
done
say "6/6 report"
ncp-jax report runs/calm_nano runs/calm_baseline_nano --out runs/calm_report
