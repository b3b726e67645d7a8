#!/usr/bin/env bash
# Everything that only a GPU host can show, in under 8 minutes: see perf/gpu_check.py. Downloads nothing and installs nothing into
# the host's Python: the packages of this repository are found where they are. Wheels of packages that the host lacks can be
# laid into gpu_check_wheels/ (git-ignored) beforehand; they are unpacked into a temporary folder.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
ln -s "$PWD/dspark_trt" "$site/dspark_trt"
ln -s "$PWD/plugins" "$site/dspark_trt_plugins"
ln -s "$PWD/triton_model_repo" "$site/dspark_trt_model_repo"
if compgen -G 'gpu_check_wheels/*.whl' >/dev/null; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$site/wheels" gpu_check_wheels/*.whl
fi
export PYTHONPATH="$site:$site/wheels:$PWD:$PWD/build_scripts:$PWD/perf${PYTHONPATH:+:$PYTHONPATH}"
"$python" perf/gpu_check.py "$@"
