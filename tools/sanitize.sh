#!/usr/bin/env bash
# Runs small random calls between ranks under compute-sanitizer: tools/sanitize.sh [rounds]. Needs a GPU.
#   memcheck, synccheck   two ranks, processes, which take turns if there is only one GPU: stray accesses in own and peers'
#                         memory, barriers that not all reach (threads would not do: the tool lets one kernel run at a time)
#   initcheck             one rank: what a peer writes from another process is unknown to the tool, so only a rank that
#                         sends to itself has every write in sight
# Prints one JSON object a tool: its name, exit status, the errors it counted. Exit status 1 if there is one.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=${1:-12}
python=${PYTHON:-python3}
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer)
export PYTHONPATH=python${PYTHONPATH:+:$PYTHONPATH}
# One allocation a tensor: torch's pool would hide what lies just behind one.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
failed=0

check() { # tool, ranks, further options of the tool
  local tool=$1 ranks=$2 log status=0 errors
  shift 2
  log=$(mktemp)
  "$sanitizer" --tool "$tool" --target-processes all --error-exitcode 99 --print-limit 20 "$@" \
    "$python" tools/soak.py --device cuda --ranks "$ranks" --rounds "$rounds" --repeats 3 --no-traffic >"$log" 2>&1 || status=$?
  errors=$(sed -n 's/.*ERROR SUMMARY: \([0-9]*\) error.*/\1/p' "$log" | awk '{ sum += $1 } END { print sum + 0 }')
  echo "{\"kind\": \"sanitize\", \"tool\": \"$tool\", \"ranks\": $ranks, \"rounds\": $rounds, \"status\": $status, \"errors\": $errors}"
  if [ "$status" -ne 0 ] || [ "$errors" -ne 0 ] || ! grep -q '"problems": \[\]' "$log"; then
    failed=1
    head -c 6000 "$log" >&2
  fi
  rm -f "$log"
}

check memcheck 2
check synccheck 2
check initcheck 1
exit "$failed"
