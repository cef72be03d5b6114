#!/usr/bin/env bash
# Makes a virtual environment with this package in it, or does nothing if it is up to date.
#
#   scripts/setup_env.sh DIRECTORY EXTRAS [CONSTRAINTS]
#
# DIRECTORY    where the environment is, or will be
# EXTRAS       extras of pyproject.toml to install with the package, such as test,benchmark
# CONSTRAINTS  a pip constraints file, such as scripts/constraints-oldest.txt
#
# Variables:
#   FEATCAL_PYTHON  interpreter to make the environment from (default: python3)
#   FEATCAL_TORCH   what pip installs as torch, options included (default: torch==2.13.0)
#
# torch is installed first and pinned, because left to the resolver any newer build could replace
# it. PyPI's Linux wheels are built for CUDA and bring several GB of libraries. That is right where
# there is an NVIDIA GPU, and works without one; for a small CPU build on Linux use PyTorch's index:
#   FEATCAL_TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
# It is not the default: many clusters and mirrors reach PyPI and nothing else.
set -euo pipefail

directory=$1
extras=$2
constraints=${3:-}
python=${FEATCAL_PYTHON:-python3}
torch=${FEATCAL_TORCH:-torch==2.13.0}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf 'setup: %s\n' "$*" >&2; }

if ! command -v "$python" >/dev/null; then
  say "'$python' was not found. Install Python 3.10 or newer, or set FEATCAL_PYTHON to it."
  exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  say "$("$python" --version 2>&1) ('$python') is too old: Python 3.10 or newer is needed." \
    "Set FEATCAL_PYTHON to a newer one."
  exit 1
fi

# Whatever the environment depends on is in the stamp, and the stamp is written last: an
# interrupted set-up leaves none, and the next run takes up the work where pip left it.
stamp=$directory/featcal-stamp
wanted=$(
  printf '%s\n' "$root" "$extras" "$torch"
  "$python" --version
  cat "$root/pyproject.toml"
  if [[ -n $constraints ]]; then cat "$constraints"; fi
)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  exit 0
fi
rm -f "$stamp"

say "making the environment $directory (the first time this takes minutes)"
# An interrupted `venv` leaves an interpreter without pip, and another Python's environment
# cannot be reused: both are made anew.
if ! "$directory/bin/python" -m pip --version >/dev/null 2>&1 ||
  [[ $("$directory/bin/python" --version) != $("$python" --version) ]]; then
  "$python" -m venv --clear "$directory"
fi
# Twice quiet: with several indexes configured, pip warns of each package that one does not have.
pip=("$directory/bin/python" -m pip --disable-pip-version-check --quiet --quiet)

if [[ $(uname -s) == Linux ]] && ! command -v nvidia-smi >/dev/null; then
  say "no NVIDIA GPU seen; PyPI's torch for Linux is a CUDA build (FEATCAL_TORCH chooses another)"
fi
say "installing $torch"
# Unquoted on purpose: FEATCAL_TORCH may carry options.
# shellcheck disable=SC2086
"${pip[@]}" install $torch

say "installing featcal-fusionbench[$extras]${constraints:+ with ${constraints##*/}}"
"${pip[@]}" install ${constraints:+--constraint "$constraints"} --editable "$root[$extras]"

printf '%s\n' "$wanted" >"$stamp"
say "done"
