#!/usr/bin/env bash
# From a fresh clone to a trained NCP model, its curves and a sample: about ten minutes on two CPU cores.
#
#   bash launch/quickstart.sh                 on the bundled megabyte of public-domain text
#   bash launch/quickstart.sh --data DIR      on your own .txt and .jsonl files
#
# Run it again and it goes on where it stopped. Everything it makes lies under corpora/ and runs/.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

data="launch/tiny_corpus/tiny_corpus.jsonl" corpus="corpora/tiny" run="runs/ncp_nano"
split=(--split-file launch/tiny_corpus/split.json)
prompt="The captain looked at the sea and"
while [ $# -gt 0 ]; do
    case "$1" in
        --data)
            [ $# -ge 2 ] || { echo "--data needs a directory or a file" >&2; exit 2; }
            data="$2"
            name="$(basename "$(realpath -m "$data")" | tr -c 'A-Za-z0-9_\n-' '_')"
            corpus="corpora/$name" run="runs/ncp_nano_$name" split=(--val-fraction 0.1)
            prompt="The"
            shift 2
            ;;
        *)
            echo "unknown option '$1'; usage: bash launch/quickstart.sh [--data DIR]" >&2
            exit 2
            ;;
    esac
done

say() { printf '\n== %s\n' "$*"; }

say "1/6 environment"
use_environment report
say "2/6 data: $data -> $corpus"
ncp-jax data prepare "$data" --out "$corpus" --train-bpe 4096 "${split[@]}"
say "3/6 training: configs/ncp_nano.py -> $run"
ncp-jax train configs/ncp_nano.py "data.mixture=[{path: '$corpus'}]" "workdir=$run"
say "4/6 held-out bits per byte, beside models that need no training"
ncp-jax yardsticks "$run"
say "5/6 a sample"
ncp-jax sample "$run" "$prompt" --tokens 120
say "6/6 report"
ncp-jax report "$run"
