#!/bin/sh
# Makes or updates .venv and installs into it what the named parts need; nothing happens when nothing changed.
#
#   tools/setup.sh PART...    PART: run (what the library imports), build (cmake, ninja, ...), test, lint, bench, clients: packages
#                             package: run and build, then the library itself in editable form
#                             nvidia: NVIDIA's own files for CUDA 12 and 13, for tests only, into build/nvidia (1.3 GB)
#
# PYTHON chooses the interpreter (default: the one .venv was made with, else python3); VENV the folder, which is left
# alone if somebody else made it. Each part is
# recorded in $VENV/installed-PART as a hash of the files that it depends on.
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
constraints=requirements/constraints.txt

fail() {
  echo "error: $*" >&2
  exit 1
}

check_interpreter() {
  command -v "$python" >/dev/null 2>&1 || fail "$python is not there: install Python 3.10 to 3.13 (Debian, Ubuntu: apt-get install python3) or set PYTHON=/path/to/python3"
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || fail "$python does not run: set PYTHON=/path/to/python3"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$python is Python $version, 3.10 to 3.13 is needed: set PYTHON=/path/to/python3"
  "$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module (Debian, Ubuntu: apt-get install python3-venv)"
}

check_compiler() {
  # CXX may hold arguments ("ccache g++"), hence unquoted.
  if [ -z "${CXX:-}" ]; then
    command -v c++ >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 || fail "there is no C++ compiler (Debian, Ubuntu: apt-get install g++)"
    for compiler in c++ g++ clang++; do command -v "$compiler" >/dev/null 2>&1 && break; done
  else
    compiler=$CXX
  fi
  echo '#include <span>' | $compiler -std=c++20 -x c++ -fsyntax-only - 2>/dev/null || fail "the C++ compiler '$compiler' does not take C++20: g++ 11 or clang 14 is needed; set CXX=/path/to/g++"
  include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  [ -f "$include/Python.h" ] || fail "$include/Python.h is missing, the headers of $python (Debian, Ubuntu: apt-get install python3-dev)"
}

hash_of() { cat "$@" | sha256sum | cut -d' ' -f1; }

# is_current PART HASH
is_current() { [ "$(cat "$venv/installed-$1" 2>/dev/null)" = "$2" ]; }

install() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --constraint "$constraints" "$@"; }

# Installs what an extra of pyproject.toml lists; the build tools of [build-system] stand in "build".
install_extra() {
  want=$(hash_of pyproject.toml "$constraints")
  is_current "$1" "$want" && return
  echo "installing the packages for: $1" >&2
  # shellcheck disable=SC2046  # one word for each requirement
  install $("$venv/bin/python" tools/requirements_of.py "$1") || fail "pip could not install the packages for '$1', see above"
  echo "$want" >"$venv/installed-$1"
}

# One folder for each CUDA: their files go by the same names. Not into the environment, where they would be found.
install_nvidia() {
  for cuda in cu12 cu13; do
    folder=build/nvidia/$cuda
    want=$(hash_of "requirements/nvidia-$cuda.txt")
    [ "$(cat "$folder/installed" 2>/dev/null)" = "$want" ] && continue
    echo "fetching NVIDIA's files for $cuda" >&2
    rm -rf "$folder"
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --target "$folder" \
      --requirement "requirements/nvidia-$cuda.txt" || fail "pip could not fetch NVIDIA's files for $cuda, see above"
    echo "$want" >"$folder/installed"
  done
}

install_package() {
  install_extra build
  install_extra run
  want=$(find csrc cmake -type f | LC_ALL=C sort | xargs cat CMakeLists.txt pyproject.toml gpucomm/version.py | sha256sum | cut -d' ' -f1)
  is_current package "$want" && return
  check_compiler
  echo "building gpucomm: compiling takes about a minute, without output" >&2
  # Without isolation, so that the build tools are the pinned ones and the next build only compiles what changed.
  install --no-build-isolation --no-deps --editable . || fail "the build failed, see above"
  echo "$want" >"$venv/installed-package"
}

# ---- the environment itself

if [ -e "$venv/pyvenv.cfg" ] && [ ! -e "$venv/made-with" ]; then
  echo "using $venv as it is: it was not made here, so nothing is installed into it" >&2
  exit 0
fi
made_with=$(cat "$venv/made-with" 2>/dev/null || true)
python=${PYTHON:-}
if [ -z "$python" ] && [ -n "$made_with" ]; then python=${made_with% for *}; fi
python=${python:-python3}
check_interpreter
executable=$("$python" -c 'import sys; print(sys._base_executable if sys.prefix != sys.base_prefix else sys.executable)')
if [ "$made_with" != "$executable for $PWD" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
  echo "making $venv with $executable" >&2
  rm -rf "$venv"
  "$python" -m venv "$venv" || fail "$python -m venv failed (Debian, Ubuntu: apt-get install python3-venv)"
  echo "$executable for $PWD" >"$venv/made-with"
fi

for part in "$@"; do
  case $part in
    package) install_package ;;
    nvidia) install_nvidia ;;
    run | build | test | lint | bench | clients) install_extra "$part" ;;
    *) fail "unknown part '$part': package, nvidia, run, build, test, lint, bench or clients" ;;
  esac
done
