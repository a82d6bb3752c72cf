#!/bin/sh
# Makes benchmarks/.peers, .peers-quark and .peers-search, the environments of the peers that cannot live beside zeropoint: torchao, llm-compressor (which
# wants an older compressed-tensors) and llama.cpp's C; Quark; those whose searches peer_accuracy.py compares. Remove a folder to start anew.
#
#   PYTHON       interpreter to use (default python3)
#   TORCH_INDEX  index to take torch from, for example one of builds without CUDA
#   CMAKE_ARGS   passed on to the build of llama.cpp, which takes about four minutes on two cores
set -eu
cd "$(dirname "$0")"
test -x .peers/bin/python || "${PYTHON:-python3}" -m venv .peers
pip() { nice -n 15 .peers/bin/python -m pip install --disable-pip-version-check "$@"; }
# torch comes first and alone: the other packages then accept the build that is there and fetch no second one.
pip ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
pip llmcompressor==0.14.0 torchao==0.18.0 gguf==0.19.0
pip llama-cpp-python==0.3.36

# Quark wants another numpy and an onnx of its own, so it lives in an environment of its own.
test -x .peers-quark/bin/python || "${PYTHON:-python3}" -m venv .peers-quark
quark() { nice -n 15 .peers-quark/bin/python -m pip install --disable-pip-version-check "$@"; }
quark ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
quark amd-quark==0.13 transformers accelerate

# Searches of scales without data: peer_accuracy.py.
test -x .peers-search/bin/python || "${PYTHON:-python3}" -m venv .peers-search
search() { nice -n 15 .peers-search/bin/python -m pip install --disable-pip-version-check "$@"; }
search ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
search llmcompressor==0.14.0 nvidia-modelopt==0.47.0 auto-round==0.15.1 hqq==0.2.8 numba
