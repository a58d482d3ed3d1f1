#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compute-sanitizer over every tactic on a few small cases: memory errors, and races in shared memory; a process for each core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
tools=(memcheck racecheck)
parts=$((($(env -u OMP_NUM_THREADS nproc) + 1) / ${#tools[@]}))
logs=$(mktemp -d)
for tool in "${tools[@]}"; do
  for part in $(seq 0 $((parts - 1))); do
    compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 20 \
      "${PYTHON:-python3}" -m tests.support.kernels.sanitize "$part" "$parts" >"$logs/$tool.$part" 2>&1 &
    processes+=($!)
  done
done
status=0
for process in "${processes[@]}"; do
  wait "$process" || status=1
done
for tool in "${tools[@]}"; do
  echo "== $tool"
  cat "$logs/$tool".*
done
rm -r "$logs"
exit "$status"
