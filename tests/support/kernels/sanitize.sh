#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compute-sanitizer over every tactic on a few small cases: memory errors, and races in shared memory; side by side, a core each.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
tools=(memcheck racecheck)
logs=$(mktemp -d)
for tool in "${tools[@]}"; do
  compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 20 "${PYTHON:-python3}" -m tests.support.kernels.sanitize \
    >"$logs/$tool" 2>&1 &
  processes+=($!)
done
status=0
for i in "${!tools[@]}"; do
  wait "${processes[$i]}" || status=1
  echo "== ${tools[$i]}"
  cat "$logs/${tools[$i]}"
done
rm -r "$logs"
exit "$status"
