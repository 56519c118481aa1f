#!/usr/bin/env bash
# Runs small random calls between ranks under compute-sanitizer: tools/sanitize.sh [rounds [seed [tool...]]]. Needs a GPU.
# Rounds are those of tools/soak.py from that seed on. Few may miss a whole kind of kernel; the ten taken without a seed
# have what tests/tools/test_sanitize.py names.
#   memcheck, synccheck   two ranks, processes, which take turns if there is only one GPU: stray accesses in own and peers'
#                         memory, barriers that not all reach (threads would not do: the tool lets one kernel run at a time)
#   initcheck             one rank: what a peer writes from another process is unknown to the tool, so only a rank that
#                         sends to itself has every write in sight
# Prints one JSON object a tool: its name, exit status, the errors it counted. Exit status 1 if there is one.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=${1:-10} seed=${2:-}
tools=${*:3}
for tool in $tools; do
  [[ $tool == memcheck || $tool == synccheck || $tool == initcheck ]] || { echo "$0: no tool $tool" >&2 && exit 2; }
done
python=${PYTHON:-python3}
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer)
export PYTHONPATH=python${PYTHONPATH:+:$PYTHONPATH}
# One allocation a tensor: torch's pool would hide what lies just behind one.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
failed=0
facts=$("$python" -c '
import json
from weft.bench.apart import apart
from weft.bench.suite import machine_facts
facts = apart(machine_facts, "cuda")
print(json.dumps({name: facts[name] for name in ("commit", "machine", "driver", "torch")})[1:-1] + ",")')

check() { # tool, ranks, seed unless one was given, further options of the tool
  local tool=$1 ranks=$2 seed=${seed:-$3} log soak status=0 errors calls
  shift 3
  [[ " ${tools:-$tool} " == *" $tool "* ]] || return 0
  log=$(mktemp)
  soak=("$python" tools/soak.py --device cuda --ranks "$ranks" --seed "$seed" --repeats 3 --no-traffic)
  # Compiles the kernels, which takes minutes under a tool.
  "${soak[@]}" --rounds "$rounds" >"$log" 2>&1 || tail -3 "$log" >&2
  "$sanitizer" --tool "$tool" --target-processes all --error-exitcode 99 --print-limit 20 "$@" \
    "${soak[@]}" --rounds "$rounds" >"$log" 2>&1 || status=$?
  errors=$(sed -n 's/.*ERROR SUMMARY: \([0-9]*\) error.*/\1/p' "$log" | awk '{ sum += $1 } END { print sum + 0 }')
  calls=$(sed -n 's/.*"kind": "soak".*"calls": \([0-9]*\),.*/\1/p' "$log")
  echo "{\"kind\": \"sanitize\", $facts \"tool\": \"$tool\", \"ranks\": $ranks, \"seed\": $seed, \"rounds\": $rounds, \"calls\": ${calls:-null}, \"status\": $status, \"errors\": $errors}"
  if [ "$status" -ne 0 ] || [ "$errors" -ne 0 ] || ! grep -q '"problems": \[\]' "$log"; then
    failed=1
    sed '/^frame/d' "$log" | head -c 6000 >&2 || true # head leaves early, and sed hears of it
  fi
  rm -f "$log"
}

check memcheck 2 41223
check synccheck 2 41223 --num-cuda-barriers 16384 # of all blocks at once; beyond what it tracks it takes a barrier for a broken one
check initcheck 1 44062
exit "$failed"
