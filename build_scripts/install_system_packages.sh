#!/usr/bin/env bash
# Debian packages that Triton's Python backend (libpython) and perf_analyzer (libb64) load. Installs only what is missing.
set -euo pipefail

python_version=$("${PYTHON:-.venv/bin/python}" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
packages=()
ldconfig -p | grep -q "libpython${python_version}\.so" || packages+=("libpython${python_version}")
ldconfig -p | grep -q 'libb64\.so\.0d' || packages+=(libb64-0d)
[ ${#packages[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
  echo "warning: these libraries are missing, and this is not a Debian machine: ${packages[*]}; serving may not start" >&2
  exit 0
fi
sudo=""
[ "$(id -u)" -eq 0 ] || sudo=sudo
echo "installing ${packages[*]}"
$sudo apt-get update -qq
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
