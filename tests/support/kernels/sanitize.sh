#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compute-sanitizer over every tactic on a few small cases: memory errors, then races in shared memory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
for tool in memcheck racecheck; do
  echo "== $tool"
  compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 20 "${PYTHON:-python3}" -m tests.support.kernels.sanitize
done
