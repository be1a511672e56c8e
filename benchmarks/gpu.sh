#!/bin/sh
# The engine's tests and the parts of the benchmarks that mean something else on a GPU, in under 8 minutes:
# run from the repository's root on a machine with a CUDA device. Without one, the same paths run on the CPU, and it says so.
#
#     benchmarks/gpu.sh [OUT]        results go to OUT (benchmarks/out/gpu)
set -u
out=${1:-benchmarks/out/gpu}
python=${PYTHON:-python}
mkdir -p "$out"
export PYTHONPATH=src:benchmarks:tests/shared
failed=""
began=$(date +%s)

device=$($python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")') || exit 1
if [ "$device" = cuda ]; then
    $python -c 'import torch; print("On", torch.cuda.get_device_name(), "torch", torch.__version__)'
else
    echo "NO CUDA DEVICE: what follows ran on the CPU, and says nothing about a GPU."
fi
# The 8 minutes are a GPU machine's; a busy CPU may take longer.
patience=$([ "$device" = cuda ] && echo 1 || echo 8)

# part NAME SECONDS COMMAND...: each has its own limit, so that one that hangs leaves time for the others.
part() {
    name=$1 limit=$(($2 * patience))
    shift 2
    start=$(date +%s)
    if timeout "$limit" "$@" >"$out/$name.txt" 2>&1; then verdict=passed; else verdict="FAILED ($?)"; failed="$failed $name"; fi
    echo "$name: $verdict in $(($(date +%s) - start)) s, $(tail -n 1 "$out/$name.txt")"
}

part engine 150 $python -m pytest -q -p no:cacheprovider tests/engine -m "not slow"
# Once more with every tensor that names no device on this one.
part engine_on_device 90 env GRADACCUM_DEVICE="$device" $python -m pytest -q -p no:cacheprovider \
    tests/engine/test_exact.py tests/engine/test_step.py tests/engine/test_windows.py tests/engine/test_terms.py
part memory 40 $python benchmarks/on_device.py memory --device "$device" --out "$out"
part oom 50 $python benchmarks/on_device.py oom --device "$device" --out "$out"
part bf16 30 $python benchmarks/on_device.py bf16 --device "$device" --out "$out"
part ragged 80 $python -m gradaccum demo --device "$device" --updates 3 --out "$out/ragged"
part counters 30 $python -m pytest -q -p no:cacheprovider tests/engine/test_move.py tests/planner/test_meter.py -m "not slow"

echo "device $device, $(($(date +%s) - began)) s in all${failed:+, FAILED:$failed}"
[ -z "$failed" ]
