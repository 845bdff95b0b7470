#!/usr/bin/env bash
# The first hour on one GPU, in order. Each step takes less than 10 minutes and decides something;
# after a failure the next ones go on.
#
#   benchmarks/first_gpu.sh            # all steps
#   benchmarks/first_gpu.sh --from 6   # from a step on
#   benchmarks/first_gpu.sh --dry      # on a CPU: the same tests, which leave out what takes a GPU, and a tiny benchmark
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=".:tests${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
first=1 dry="" number=0 failed=()
while [ $# -gt 0 ]; do
    case $1 in
        --dry) dry=1 ;;
        --from) first=$2; shift ;;
        *) echo "usage: $0 [--dry] [--from STEP]" >&2; exit 2 ;;
    esac
    shift
done

# step WHAT IF_IT_FAILS COMMAND...
step() {
    local what=$1 if_it_fails=$2 begun=$SECONDS
    shift 2
    number=$((number + 1))
    [ "$number" -ge "$first" ] || return 0
    echo "== $number. $what"
    if timeout 590 "$@"; then
        echo "== $number. ok, $((SECONDS - begun)) s"
    else
        echo "== $number. FAILED after $((SECONDS - begun)) s: $if_it_fails"
        failed+=("$number. $what")
    fi
}

# tests WHAT IF_IT_FAILS SELECTION: some of tests/runtime/test_cuda.py
tests() {
    step "$1" "$2" "$python" -m pytest tests/runtime/test_cuda.py tests/runtime/test_cuda_programs.py -q -rs -p no:cacheprovider -k "$3"
}

versions='
import importlib.util, sys, torch
nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else "none"
triton = __import__("triton").__version__ if importlib.util.find_spec("triton") else "none"
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, Triton {triton}")
print(*map(torch.cuda.get_device_properties, range(torch.cuda.device_count())), sep="\n")
sys.exit("no GPU" if not torch.cuda.is_available() and not sys.argv[1] else 0)
'

if [ -n "$dry" ]; then
    speed=(--model tiny --device cpu --steps 5 --peers torch)
    report=(--model tiny --device cpu --steps 5 --peers ftp)
else
    speed=(--bars --peers "torch compiled" "ftp compiled")
    report=(--bars --peers ftp)
fi

step "versions" "nothing below says anything" "$python" -c "$versions" "$dry"
[ ${#failed[@]} -eq 0 ] || exit 1
tests "bits, pinned copies, saves" "draws, loaders or checkpoints are wrong on GPUs" "bits_are_those or pinned or saved"
tests "eager train steps without a hidden wait" "the rank's graph is wrong, or waits" \
    "(train_step and eager) or attention or simulated"
tests "compiled train steps" "Triton's kernels of the pieces are wrong" "train_step and compile and not cuda_graph"
tests "recorded train steps" "cuda_graph=True is of no use yet" "train_step and cuda_graph"
tests "a recording that fails, then a good one" "a process whose recording failed has to end" "spoils_no_later_one"
tests "compiled bits at large strides" "large draws under compile=True are wrong" "far_apart"
tests "ranks that share a GPU" "gloo does not take tensors of GPUs: they are to be refused" "share_a_gpu"
tests "one rank over NCCL, recorded and ended" "processes that record hang as they end" "over_nccl_is_recorded"
step "speed beside torch compiled" "over 1.02, or the losses differ" "$python" benchmarks/gpu.py "${speed[@]}"
step "what the report says of the step" "its peak is over 10 % off, or its time over 25 %" \
    "$python" benchmarks/gpu.py "${report[@]}"

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "all steps are through${dry:+, dry}"
