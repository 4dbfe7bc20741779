#!/usr/bin/env bash
# One command on a machine without a GPU: environment, a small real model, a real sweep, its front and report.
#   scripts/demo.sh [key=value ...]      further overrides go to `sweep run`
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup_cpu.sh
.venv/bin/python scripts/prepare_smollm2.py
exec .venv/bin/sweep run study=demo model=smollm2_135m hardware=cpu engine=vllm_cpu workload=cpu_demo \
  search_space=cpu_small budget=demo proof=shared_cores \
  validation.finalists=1 "$@"
