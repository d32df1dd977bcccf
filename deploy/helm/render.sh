#!/bin/sh
# Writes the manifests of every example to ../kubernetes, for those who use no Helm, and for the tests.
set -eu
cd "$(dirname "$0")"
for example in examples/*.yaml; do
    name=$(basename "$example" .yaml)
    {
        echo "# Made of deploy/helm/$example by deploy/helm/render.sh: change the chart, not this file."
        "${HELM:-helm}" template penstock penstock --values "$example"
    } >"${OUT:-../kubernetes}/$name.yaml"
done
