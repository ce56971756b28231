#!/usr/bin/env bash
# Every recipe of the catalogue, on the digits and for a few rounds on the paper's data sets: results/compare/*.txt
#     FLRCE_DATA=DIR results/compare.sh        (DIR holds the sets made by `flrce data prepare`)
set -euo pipefail
cd "$(dirname "$0")/.."
flrce=.venv/bin/flrce
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compare() {  # NAME ARGUMENTS...
    local name=$1
    shift
    {
        echo "\$ flrce compare $*"
        $flrce compare "$@" --out "$work/$name" 2>/dev/null | grep -v '^report: '
        echo "$($flrce --version); $(uname -m), $(nproc) cores"
    } > "results/compare/$name.txt"
}

mkdir -p results/compare
compare digits experiments/digits.toml --recipes all --seeds 0-2
for name in cifar10 cifar100 femnist speech; do
    compare $name experiments/$name.toml --recipes all --seeds 0 --set rounds=5 --set data.partition=quantity --set engine.eval_every=5
done
