#!/usr/bin/env bash
# Runs the torch-free check programs under sanitizers: the CPU kernels' one built with ASan and UBSan, the GPU's under compute-sanitizer's
# four tools, side by side. What cannot run here is named with its reason, and is no failure. An argument, cpu or gpu, asks for one half.
# Environment: SANITIZE_BUILD, where objects go; SANITIZE_SECONDS, after which a tool has failed.
set -uo pipefail
cd "$(dirname "$0")/.."
build=${SANITIZE_BUILD:-build/sanitize}
mkdir -p "$build"
build=$(cd "$build" && pwd)
summary=()
failed=0

# name, command...: its output to a log, which is shown where it fails.
report() {
  local name=$1
  shift
  if "$@" >"$build/$name.log" 2>&1; then
    summary+=("$name=ran")
  else
    failed=1
    summary+=("$name=FAILED")
    tail -60 "$build/$name.log"
  fi
}

cpu() {
  cmake -S cmake -B "$build/cpu" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer" &&
    cmake --build "$build/cpu" --target selfcheck -j "$(nproc)" &&
    UBSAN_OPTIONS=print_stacktrace=1 "$build/cpu/selfcheck" --quick
}

# Nothing, or why the GPU half cannot run.
without_gpu() {
  command -v nvcc >/dev/null || { echo "no nvcc"; return; }
  command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer"; return; }
  nvidia-smi -L 2>/dev/null | grep -q GPU || echo "no NVIDIA GPU"
}

# racecheck watches every access to shared memory: it gets each kernel once instead of every option. Initcheck reads no padding: the
# programs poison their buffers.
tool() {
  local options="--quick --every=3"
  [ "$1" = racecheck ] && options="--quick --kernels"
  timeout "${SANITIZE_SECONDS:-300}" compute-sanitizer --tool "$1" --error-exitcode 1 "$build/gpu/selfcheck" $options
}

[ "${1:-cpu}" = cpu ] && report cpu cpu
reason=$(without_gpu)
if [ "${1:-gpu}" != gpu ]; then
  :
elif [ -n "$reason" ]; then
  summary+=("gpu=skipped ($reason)")
else
  report build make -s -j "$(nproc)" -C tests/gpu BUILD="$build/gpu"
  if [ "${summary[-1]}" = build=ran ]; then
    for name in memcheck racecheck initcheck synccheck; do
      (tool $name >"$build/$name.out" 2>&1; echo $? >"$build/$name.status") &
    done
    wait
    for name in memcheck racecheck initcheck synccheck; do
      report $name bash -c "cat '$build/$name.out'; exit \$(cat '$build/$name.status')"
      grep -hE "checks passed|ERROR SUMMARY|RACECHECK SUMMARY" "$build/$name.log" | sed "s/^/$name: /"
    done
  fi
fi
echo "sanitize: ${summary[*]}"
exit $failed
