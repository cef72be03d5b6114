#!/usr/bin/env bash
# Runs an embedded benchmark, setting up its environment first. Arguments are passed through:
#
#   scripts/demo.sh          # images: seven CLIP experts
#   scripts/demo.sh text     # texts: six T5 experts
#   scripts/demo.sh --help
#
# FEATCAL_VENV says where the environment is (default: .venv; a relative path is below the
# checkout). See scripts/setup_env.sh for more variables.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

venv=${FEATCAL_VENV:-.venv}
[[ $venv == /* ]] || venv=$root/$venv
bash "$root/scripts/setup_env.sh" "$venv" test,benchmark
# From the caller's directory, so that relative paths among the arguments mean what they say.
exec "$venv/bin/python" -m featcal_fusionbench.benchmark "$@"
