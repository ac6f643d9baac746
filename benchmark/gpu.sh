#!/usr/bin/env bash
# What one GPU does, in at most eight minutes: see benchmark/gpu.py. A JSON is written after each row.
set -euo pipefail
cd "$(dirname "$0")/.."
exec timeout --signal INT --kill-after 10 480 "${PYTHON:-python}" -m benchmark.gpu "$@"
