#!/usr/bin/env bash
# The test suite in an environment of its own. Further arguments go to pytest: bash launch/test.sh tests/ops -k route
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment report,notebooks,test
export JAX_PLATFORMS=cpu
exec python -m pytest "$@"
