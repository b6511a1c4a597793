#!/bin/sh
# Every check of the sources' form and types: lint.sh [--fix] [CHECK...]; without CHECK all of them:
#   ruff-check ruff-format clang-format mypy
# --fix rewrites what can be rewritten. The tools are taken from PATH (`make lint` puts .venv/bin first).
set -eu
cd "$(dirname "$0")/.."
if [ "${1:-}" = --fix ]; then
  shift
  ruff_check="--fix" ruff_format="" clang_format="-i"
else
  ruff_check="" ruff_format="--check" clang_format="--dry-run -Werror"
fi
[ $# -gt 0 ] || set -- ruff-check ruff-format clang-format mypy

failed=
for check in "$@"; do
  echo "== $check"
  # shellcheck disable=SC2086  # the options are words
  case $check in
    ruff-check) ruff check $ruff_check . ;;
    ruff-format) ruff format $ruff_format . ;;
    clang-format) find csrc tests/abi tests/cost tests/cpp tests/fake_cuda -name '*.h' -o -name '*.cpp' -o -name '*.cu' | xargs clang-format $clang_format ;;
    mypy) mypy ;;
    *) echo "error: unknown check '$check': ruff-check, ruff-format, clang-format or mypy" >&2 && exit 2 ;;
  esac || failed="$failed $check"
done
if [ -n "$failed" ]; then
  echo "error: failed:$failed" >&2
  exit 1
fi
