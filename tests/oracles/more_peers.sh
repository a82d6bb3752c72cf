#!/bin/sh
# Makes tests/oracles/.peers and tests/oracles/.peers-quark, the environments of the packages that tests/oracle/ compares file layouts with and
# that cannot live beside zeropoint. Run the tests with their Python, PYTHONPATH=src: .peers-quark/bin/python -m pytest tests/oracle/test_quark.py,
# .peers/bin/python -m pytest -m "slow or not slow" -W ignore::DeprecationWarning tests/codecs/test_quanto.py (torch warns of what Quanto uses).
#
#   PYTHON       interpreter to use (default python3)
#   TORCH_INDEX  index to take torch from, for example one of builds without CUDA
set -eu
cd "$(dirname "$0")"
make() {
    folder=$1; shift
    test -x "$folder/bin/python" || "${PYTHON:-python3}" -m venv "$folder"
    install() { nice -n 15 "$folder/bin/python" -m pip install --disable-pip-version-check "$@"; }
    # torch comes first and alone: the other packages then accept the build that is there and fetch no second one.
    install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
    install -e ../..[hf,test] "$@"
}
make .peers bitsandbytes==0.50.2 torchao==0.18.0 hqq==0.2.8 optimum-quanto==0.2.7
# Quark wants another numpy and an onnx of its own.
make .peers-quark amd-quark==0.13
