#!/usr/bin/env bash
# Runs the GPU tests, and compares two ranks that share a GPU with one, with a Python that has a CUDA build of PyTorch.
# Needs no network and no `make setup`.
#
#     tools/gpu_check.sh [WHEELS] [PYTEST_OPTION...]
#
#   PYTHON=python3   the Python to use; nothing is installed into it
#   WHEELS           a folder with wheels of the packages that this Python lacks, such as pytest and hypothesis.
#                    On a machine with a network: pip download --dest WHEELS --only-binary :all: --no-deps PACKAGE...
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
wheels=
if [[ -d ${1:-} ]]; then
    wheels=$(cd "$1" && pwd)
    shift
    if ! compgen -G "$wheels/*.whl" > /dev/null; then
        echo "gpu_check.sh: no wheels in $wheels; hint: pip download --dest DIR --only-binary :all: --no-deps PACKAGE..." >&2
        exit 2
    fi
fi
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
python=${PYTHON:-python3}
if [[ $wheels ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$packages" "$wheels"/*.whl
fi
export PYTHONPATH=$PWD:$packages${PYTHONPATH:+:$PYTHONPATH}
"$python" -m pytest -m gpu -rs "$@" tests/test_arrays.py tests/test_gpu.py
if [[ ${HVDTRAIN_GPU_TESTS:-} == cpu ]]; then
    "$python" tools/bench_gpu.py --device cpu --hosts 1
else
    "$python" tools/bench_gpu.py --hosts 1
fi
