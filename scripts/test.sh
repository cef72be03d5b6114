#!/usr/bin/env bash
# Runs the test suite, setting up its environment first.
#
#   scripts/test.sh [PYTEST ARGUMENTS]            newest releases
#   scripts/test.sh --oldest [PYTEST ARGUMENTS]   oldest supported ones (constraints-oldest.txt)
#
# FEATCAL_VENV says where the environment is (default: .venv; a relative path is below the
# checkout); the one for --oldest lies beside it with the suffix -oldest. FEATCAL_TEST_JOBS is the
# number of processes that share the test files (default: 2; 0: none but pytest's own). See
# scripts/setup_env.sh for more variables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${FEATCAL_VENV:-.venv}
constraints=
if [[ ${1:-} == --oldest ]]; then
  shift
  venv+=-oldest
  constraints=scripts/constraints-oldest.txt
fi

bash scripts/setup_env.sh "$venv" test,benchmark "$constraints"
# What one release of transformers saves is read by the other, where its environment is there.
other=$([[ -n $constraints ]] && echo "${venv%-oldest}" || echo "$venv-oldest")
if [[ -x $other/bin/python ]]; then
  FEATCAL_OTHER_PYTHON=$(cd "$other/bin" && pwd)/python
  export FEATCAL_OTHER_PYTHON
fi
exec "$venv/bin/python" -m pytest -n "${FEATCAL_TEST_JOBS:-2}" --dist loadfile "$@"
