#!/bin/sh
# Makes the environments of the packages that tests compare file layouts with and that cannot live beside zeropoint, tests/oracles/.peers,
# .peers-quark, .peers-gptqmodel and .peers-openvino: all, or those that are named, as in `more_peers.sh .peers`. `make test-slow PIECE=name` makes what
# a piece needs and runs its tests; by hand their Python does, with PYTHONPATH=src: .peers-quark/bin/python -m pytest tests/oracle/test_quark.py,
# .peers/bin/python -m pytest -m "" -W ignore::DeprecationWarning tests/codecs/test_quanto.py (torch warns of what Quanto uses).
#
#   PYTHON       interpreter to use (default python3)
#   TORCH_INDEX  index to take torch from, for example one of builds without CUDA
set -eu
cd "$(dirname "$0")"
make() {
    folder=$1; torch=$2; shift 2
    test -x "$folder/bin/python" || "${PYTHON:-python3}" -m venv "$folder"
    install() { nice -n 15 "$folder/bin/python" -m pip install --disable-pip-version-check "$@"; }
    # torch comes first and alone: the other packages then accept the build that is there and fetch no second one.
    install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
    install -e ../..[hf,test] "$@"
}
for folder in ${*:-.peers .peers-quark .peers-gptqmodel .peers-openvino}; do
    case $folder in
        .peers) make $folder torch==2.13.0 bitsandbytes==0.50.2 torchao==0.18.0 hqq==0.2.8 optimum-quanto==0.2.7 ;;
        # Quark wants another numpy and an onnx of its own.
        .peers-quark) make $folder torch==2.13.0 amd-quark==0.13 ;;
        .peers-gptqmodel) make $folder torch==2.14.1 gptqmodel==7.7.0 optimum==2.3.0 torchao==0.18.0 ;;
        .peers-openvino) make $folder torch==2.13.0 -c ../../constraints.txt onnx onnxruntime openvino==2026.4.1 nncf==3.4.0 ;;
        *) echo "there is no environment $folder" >&2; exit 2 ;;
    esac
done
