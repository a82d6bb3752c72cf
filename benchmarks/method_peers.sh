#!/bin/sh
# Makes benchmarks/.peers-methods, .peers-autoround, .peers-gptqmodel, .peers-brevitas and .peers-nncf, the environments of the tools that
# methods.py --peers all compares: llm-compressor and ModelOpt, auto-round, GPTQModel, Brevitas, NNCF, which want other versions of each other's
# packages; llama.cpp is in that of llama_cpp.sh. Remove a folder to start anew.
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
    install "$@"
}
make .peers-methods torch==2.13.0 llmcompressor==0.14.0 nvidia-modelopt==0.47.0 numba accelerate
make .peers-autoround torch==2.13.0 auto-round==0.16.1 numba accelerate
make .peers-gptqmodel torch==2.14.1 gptqmodel==7.7.0 optimum==2.3.0
make .peers-brevitas torch==2.13.0 brevitas==0.13.4 transformers accelerate 'setuptools<81'
make .peers-nncf torch==2.13.0 nncf==3.4.0 openvino==2026.4.1 transformers accelerate
