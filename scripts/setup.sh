#!/usr/bin/env bash
# Installs what mzd needs on this machine and says what it does; skips what is there.
#   scripts/setup.sh            system packages, virtual environment, mzd itself
#   scripts/setup.sh --dev      the same with what tests and checks need
set -euo pipefail
cd "$(dirname "$0")/.."

extras=""
[ "${1:-}" = "--dev" ] && extras="[dev]"
venv="${VENV:-.venv}"
python="${PYTHON:-python3}"

say() { printf 'setup: %s\n' "$*"; }

# On Termux the system packages have other names and no root is needed.
if [ -n "${TERMUX_VERSION:-}" ]; then
    for package in python clang make opencl-headers ocl-icd python-numpy; do
        dpkg -s "$package" >/dev/null 2>&1 && continue
        say "pkg install $package"
        pkg install -y "$package"
    done
elif command -v dpkg-query >/dev/null 2>&1; then
    # PoCL is the OpenCL device of machines without a GPU; the compiler builds the C extension.
    missing=()
    for package in ca-certificates gcc libc6-dev make ocl-icd-libopencl1 pocl-opencl-icd python3 python3-dev python3-venv; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
    done
    if [ ${#missing[@]} -eq 0 ]; then
        say "all system packages are there"
    elif [ "$(id -u)" -eq 0 ]; then
        say "apt-get install ${missing[*]}"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    else
        say "these system packages are missing and this user may not install them; ask for:"
        say "    sudo apt-get install ${missing[*]}"
        exit 1
    fi
else
    say "no apt here: install a C compiler, Python 3.11 or newer with venv, and an OpenCL driver (PoCL for the CPU) yourself"
fi

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])' || {
    say "$python is $("$python" --version 2>&1); mzd needs 3.11 or newer (set PYTHON=...)"
    exit 1
}

if [ ! -x "$venv/bin/python" ]; then
    say "making the virtual environment $venv with $("$python" --version)"
    site=""
    [ -n "${TERMUX_VERSION:-}" ] && site="--system-site-packages"
    "$python" -m venv $site "$venv"
fi

# The stamp holds what was installed from: nothing is done when neither dependencies nor C sources changed.
stamp="$venv/.mzd-setup"
wanted="$(cat pyproject.toml setup.py native/*.[ch] scripts/setup.sh | cksum) $extras"
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    say "mzd$extras is installed in $venv"
else
    say "pip install -e .$extras (into $venv)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".$extras"
    printf '%s' "$wanted" >"$stamp"
fi
