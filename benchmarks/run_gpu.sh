#!/usr/bin/env bash
# Runs what docs/performance.md is made of on a machine with several GPUs: benchmarks/run_gpu.sh FOLDER [STEP...]
# Steps: bench small late cost where tune soak kill kill_large tests compile examples sanitize (without any: all). Each writes
# FOLDER/gpu_STEP.jsonl and FOLDER/STEP.log, and goes on with the next if it fails. Builds the native module beside the sources if it is not there. PYTHON names the
# interpreter; SECONDS_EACH bounds a step; COMMIT is written where a tree without git knows none; SOAK gives the seconds of calls and of graphs, and the first seed.
# On one GPU ranks share it: cost, soak, kill, kill_large, tests, compile and sanitize run there too, soak with 4, 3 and 2 ranks in turn (gpu_soak_4.jsonl ...).
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(bench small late cost where tune soak kill kill_large tests compile examples sanitize)
python=${PYTHON:-python3}
limit=${SECONDS_EACH:-600}
read -r call_s graph_s seed <<<"${SOAK:-60 90 0}"
num_gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
kill_ranks=$((num_gpus > 1 ? num_gpus : 3))
mkdir -p "$folder"
export PYTHONPATH=python${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
weft=("$python" -m weft.cli)

if ! "$python" -c 'import weft._native' 2>/dev/null; then
  build=$(mktemp -d)
  cmake -S . -B "$build" -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" -DWEFT_MODULE_DIR="$PWD/python/weft" \
    >"$folder/build.log" 2>&1 && cmake --build "$build" >>"$folder/build.log" 2>&1 || { tail -30 "$folder/build.log"; exit 1; }
  rm -rf "$build"
fi

run() { # step, command...: INT first, so that what was measured is still written
  local step=$1 begin=$SECONDS status=0
  shift
  timeout -s INT -k 20 "$limit" "$@" >"$folder/gpu_$step.jsonl" 2>"$folder/$step.log" || status=$?
  echo "$step: status $status, $((SECONDS - begin)) s"
  [ "$status" -eq 0 ] || tail -5 "$folder/$step.log"
  [ -z "${COMMIT:-}" ] || sed -i "s/\"commit\": null/\"commit\": \"$COMMIT\"/" "$folder/gpu_$step.jsonl"
}

for step in "${steps[@]}"; do
  ranks=(--ranks "$num_gpus")
  case $step in
    bench) run bench "${weft[@]}" bench --device cuda "${ranks[@]}" --suite targets,routings,tokens,sms,step --trace benchmarks/traces/demo_e256_k8.npz \
      --plot "$folder/bandwidth.png" --json ;;
    small) run bench_small "${weft[@]}" bench --device cuda "${ranks[@]}" --suite small --json ;;
    late) run late "${weft[@]}" bench --device cuda "${ranks[@]}" --who-is-late --late-rank 1 --late-us 1000 --tokens 128 --hidden 7168 \
      --experts 256 --capacity 8192 --layout expert_major --json ;;
    cost)
      if [ "$num_gpus" -eq 1 ]; then ranks=(--isolation thread); fi
      run wait_cost "$python" lab/wait_cost.py "${ranks[@]}" ;;
    where) run where_time_goes "$python" lab/where_time_goes.py "$num_gpus" ;;
    tune) run tune "${weft[@]}" tune --device cuda "${ranks[@]}" --output "$folder/tuning.json" --json ;;
    soak)
      soak=("$python" tools/soak.py --device cuda --repeats 40 --seconds "$call_s" --graph-seconds "$graph_s")
      if [ "$num_gpus" -gt 1 ]; then
        run soak "${soak[@]}" "${ranks[@]}" --seed "$seed" --progress "$folder/soak_so_far.jsonl"
      else
        for number in 4 3 2; do
          run "soak_$number" "${soak[@]}" --seed "$((seed + 100000 * number))" --ranks "$number" --isolation thread --no-traffic \
            --progress "$folder/soak_${number}_so_far.jsonl"
        done
      fi ;;
    kill) run kill "${weft[@]}" verify --kill --device cuda --ranks "$kill_ranks" --trials 34 --deaths $((kill_ranks - 1)) --experts $((16 * kill_ranks)) --top-k 8 --dtype bf16 \
      --quantize none --layout expert_major --json ;;
    kill_large) run kill_large "${weft[@]}" verify --kill --device cuda --ranks "$kill_ranks" --trials 17 --deaths $((kill_ranks > 2 ? 2 : 1)) --mode throughput --tokens 4096 \
      --hidden 2048 --experts $((16 * kill_ranks)) --top-k 8 --dtype bf16 --quantize none --layout expert_major --json ;;
    tests) WEFT_TEST_LATE_S=1,5,30 limit=$((3 * limit)) run tests "$python" tools/record_tests.py -q -p no:cacheprovider tests/gpu ;;
    compile) run compile "${weft[@]}" cache prebuild --folder "$(mktemp -d)/kernels" --jobs 1 --json ;;
    examples) run examples "$python" tools/example_runs.py "${ranks[@]}" ;;
    sanitize) run sanitize tools/sanitize.sh ;;
    *) echo "unknown step $step" && exit 2 ;;
  esac
done
