#!/usr/bin/env bash
# Creates the Python environment of the peers: tools/benchmarks/peers.sh PEERS
# Compiling llama.cpp takes about nine minutes.
set -euo pipefail
peers=${1:?usage: tools/benchmarks/peers.sh PEERS}
python3 -m venv "$peers"
pip() { "$peers/bin/pip" --disable-pip-version-check install -q "$@"; }
pip torch==2.13.0
pip openvino==2026.4.1 openvino-genai==2026.4.1.0 "optimum-intel[openvino]==2.2.0" nncf==3.4.0 gguf
# AMX stays off: llama.cpp's AMX code can crash with SIGILL.
has() { grep -qm1 " $1 " /proc/cpuinfo && echo ON || echo OFF; }
export CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_BMI2=ON -DGGML_FMA=ON \
-DGGML_F16C=ON -DGGML_AVX512=$(has avx512bw) -DGGML_AVX512_VBMI=$(has avx512vbmi) -DGGML_AVX512_VNNI=$(has avx512_vnni) \
-DGGML_AVX512_BF16=$(has avx512_bf16) -DGGML_AMX_INT8=OFF -DGGML_AMX_TILE=OFF -DGGML_AMX_BF16=OFF"
pip --no-binary llama-cpp-python llama-cpp-python==0.3.36
