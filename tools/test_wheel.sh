#!/usr/bin/env bash
# Installs a wheel into a clean environment and runs `weft verify` there, with nothing but that environment on PATH:
# no compiler, no CMake, no checkout. With the wheel of weft-deep-ep beside it `import deep_ep` is tried, too.
# Usage: test_wheel.sh PYTHON WHEEL [WHEEL]
set -euo pipefail
python=$1
wheels=()
for wheel in "${@:2}"; do wheels+=("$(realpath "$wheel")"); done
export PIP_CONSTRAINT=${BASH_SOURCE[0]%/*}/../constraints.txt
PIP_CONSTRAINT=$(realpath "$PIP_CONSTRAINT")
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT

"$python" -m venv "$home/venv"
"$home/venv/bin/python" -m pip install --quiet --no-compile "${wheels[@]}" # what is not imported need not be compiled
cd "$home"
run() { env -i HOME="$home" PATH="$home/venv/bin" LANG=C.UTF-8 "$@"; }
for tool in cc gcc g++ clang cmake ninja nvcc; do
  if run python -c "import shutil, sys; sys.exit(shutil.which('$tool') is None)"; then
    echo "test_wheel.sh: $tool is on PATH, so this would prove nothing" >&2
    exit 1
  fi
done
run weft --version
run weft verify --trials 3
if [ ${#wheels[@]} -gt 1 ]; then
  run python -c "import deep_ep.utils.math, weft.deep_ep; assert deep_ep is weft.deep_ep; print('deep_ep', deep_ep.__version__)"
fi
