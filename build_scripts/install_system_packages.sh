#!/usr/bin/env bash
# Debian packages that Triton's Python backend (libpython) and perf_analyzer (libb64) load, tools of the tests, and the programs that are
# named behind it. Installs only what is missing; where that cannot be done it says so, and goes on: not everything needs them, and what
# does names them again.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin" # ldconfig is there, and Debian's users do not look there

python=${PYTHON:-.venv/bin/python}
python_version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# The interpreter's own library, as conda and builds with --enable-shared have one: `serve` finds it.
own_libpython=$("$python" -c 'import sysconfig as s; print(s.get_config_var("LIBDIR"), s.get_config_var("INSTSONAME"), sep="/")')
libraries=$(ldconfig -p) # not piped into grep -q: that ends ldconfig early, which pipefail takes for a failure
packages=()
[[ $own_libpython == *.so* && -e $own_libpython ]] || [[ $libraries == *"libpython${python_version}.so"* ]] ||
  packages+=("libpython${python_version}")
[[ $libraries == *libb64.so.0d* ]] || packages+=(libb64-0d)
for tool in curl openssl "$@"; do # the tests ask and encrypt with them
  command -v "$tool" >/dev/null || packages+=("$tool")
done
[ ${#packages[@]} -eq 0 ] && exit 0

sudo=""
[ "$(id -u)" -eq 0 ] || sudo=sudo
install="apt-get install --no-install-recommends ${packages[*]}"
echo "installing ${packages[*]}"
if ! { command -v apt-get && command -v ${sudo:-true}; } >/dev/null; then
  echo "warning: serving or load tests may not start: no rights or no apt-get for \`$install\`" >&2
elif ! { $sudo apt-get update -qq && $sudo env DEBIAN_FRONTEND=noninteractive $install -y -qq >/dev/null; }; then
  echo "warning: serving or load tests may not start: \`$install\` failed" >&2
fi
