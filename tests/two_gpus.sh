#!/usr/bin/env bash
# Everything that needs two NVIDIA GPUs: tests/test_two_gpus.py, then benchmarks/expert_parallel.py with the arguments given here.
# With fewer GPUs it says so and is no failure. Environment: PYTHON, the interpreter that holds torch and int4_emu.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
count=$("$python" -c "import torch; print(torch.cuda.device_count())") || exit 1
if [ "$count" -lt 2 ]; then
  echo "two-gpus: skipped (two GPUs: torch sees $count)"
  exit 0
fi
failed=0
"$python" -m pytest -n 0 -rfE --tb=short tests/test_two_gpus.py || failed=1
"$python" benchmarks/expert_parallel.py "$@" || failed=1
[ $failed = 0 ] && echo "two-gpus: ran" || echo "two-gpus: FAILED"
exit $failed
