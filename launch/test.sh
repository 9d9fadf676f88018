#!/usr/bin/env bash
# The test suite in an environment of its own. Further arguments go to pytest: bash launch/test.sh tests/ops -k route
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment report,notebooks,test
export JAX_PLATFORMS=cpu
# Two workers: most of a test is compilation, which one core does alone.
exec python -m pytest --numprocesses 2 --dist loadfile "$@"
