#!/usr/bin/env bash
# Installs what the tests need and runs all of them, real vLLM servers included.
#   scripts/test.sh [pytest arguments]      scripts/test.sh -m "not engine" takes seconds once installed
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup_cpu.sh
.venv/bin/python scripts/prepare_smollm2.py
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
exec .venv/bin/python -m pytest "$@"
