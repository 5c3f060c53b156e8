#!/usr/bin/env bash
# Converts a model for OpenVINO in 4 and 8 bits: tools/benchmarks/convert.sh MODEL.gguf PEERS
# Run it in an environment with Inlay. Models are written to PEERS/models.
set -euo pipefail
model=${1:?usage: tools/benchmarks/convert.sh MODEL.gguf PEERS} peers=${2:?usage: tools/benchmarks/convert.sh MODEL.gguf PEERS}
name=$(basename "$model" .gguf) plain=$(mktemp -d)
trap 'rm -rf "$plain"' EXIT
python -m tools.benchmarks.hf_folder "$model" "$plain"
mkdir -p "$peers/models"
convert() { "$peers/bin/optimum-cli" export openvino -m "$plain" --task text-generation-with-past "$@"; }
convert --weight-format int4 --group-size 32 --ratio 1.0 "$peers/models/$name-int4"
convert --weight-format int8 "$peers/models/$name-int8"
