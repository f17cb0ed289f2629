#!/usr/bin/env bash
# The regression job: is HEAD slower than BASE? Both are installed side by side and measured by paired starts.
# Exit code 0 pass, 1 regression, 2 it could not be measured, 3 no verdict. What CI runs is this script, step by step:
#
#     tools/premerge.sh                     # all steps, HEAD (what is committed) against origin/main
#     tools/premerge.sh checkout|install|measure
#
# BASE, HEAD    the two commits
# WORK          where checkouts, environments and results go
# GATE          the limits of the verdict
# MINUTES       most minutes of measuring
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

BASE=${BASE:-origin/main}
HEAD=${HEAD:-HEAD}
WORK=${WORK:-build/regression}
# A limit on CPU time is one on waiting time too. Error rates, also of 5 % on CPU time: docs/measuring.md.
GATE=${GATE:-duration<=+10% cpu_seconds<=+10% kl<=0.001 weight_bytes<=+0%}
MINUTES=${MINUTES:-7.5}
PYTHON=${PYTHON:-python3}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

checkout() {
    for side in base head; do
        [[ $side == base ]] && commit=$BASE || commit=$HEAD
        rm -rf "${WORK:?}/$side"
        mkdir -p "$WORK/$side"
        git archive "$commit" | tar -x -C "$WORK/$side"
    done
}

install() {
    for side in base head; do
        "$PYTHON" tools/side_by_side.py "$WORK/$side" "$WORK/$side-env"
    done
}

# Only the first start of each build scores quality. The sources of this checkout must not reach the environments.
measure() {
    rm -rf "$WORK/result"
    env -u PYTHONPATH "$WORK/head-env/bin/llmopt" compare \
        --run "base=$WORK/base-env" --run "head=$WORK/head-env" --gate "$GATE" --max-minutes "$MINUTES" \
        --output "$WORK/result" --markdown "$WORK/summary.md" --junit "$WORK/verdict.xml" \
        --benchmark-json "$WORK/bench.json" \
        -- --reference stories3M --quality-tokens 1024
}

case ${1:-all} in
    all) checkout; install; measure ;;
    checkout | install | measure) "$1" ;;
    *) echo "usage: tools/premerge.sh [all|checkout|install|measure]" >&2; exit 2 ;;
esac
