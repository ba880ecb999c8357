#!/usr/bin/env bash
# Everything that one GPU has to show, in one run: kernel and engine tests, memcheck and racecheck, both engines against
# each other, the decode loop, and what is timed; and where there are two, what several have to show. Prints a line a
# job; logs and the jobs' last lines go to OUT.
#
#   tools/qualify_gpu.sh OUT [REFERENCES [JOBS]]
#
# REFERENCES: a folder with lengths.npy from `check_lengths --reference FILE --reference-only`, which needs no GPU; without
# it that is computed here.
# JOBS: a regular expression that the whole name of a job matches; all by default.
# Rows are appended to tools/benchlog/. Tests and checks run side by side first, then what is timed, one at a time.
set -u
[ $# -ge 1 ] || { sed -n '2,11p' "$0" | cut -c3-; exit 2; }
cd "$(dirname "$0")/.." || exit 2
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
references=${2:-$out}
jobs=${3:-.*}
export PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-2}
python=${PYTHON:-python3}
pytest="$python -m pytest -q --no-header -p no:cacheprovider"
failures=$out/failures
: > "$failures"

job() {  # name, seconds at the most, command
    local name=$1 limit=$2 begin=$SECONDS status
    shift 2
    [[ $name =~ ^($jobs)$ ]] || return 0
    timeout -k 5 "$limit" bash -c "$*" > "$out/$name.log" 2>&1
    status=$?
    printf '%-14s exit %3d after %3d s: %s\n' "$name" $status $((SECONDS - begin)) \
        "$(grep -v '^ *$' "$out/$name.log" | tail -1 | cut -c1-150)"
    [ $status -eq 0 ] || echo "$name" >> "$failures"
}

nano="$python -m cuq1.generate --device cuda --loop host --chat 'Write a loop' --max-tokens 12"
qwen=$out/qwen.nanoqwen
packed() { echo "$python -m tools.make_checkpoint --config qwen2.5-coder-7b-tiny $out/qwen && $python -m cuq1.pack $out/qwen $qwen"; }
sanitize() { echo "compute-sanitizer --tool $1 --error-exitcode 1 --print-limit 20 $nano ${*:2}"; }

job kernels-a 240 "$pytest tests/kernels/test_experts.py tests/kernels/test_told.py" &
job kernels-c 240 "$pytest tests/kernels/test_prefill.py tests/kernels/test_prefill_chunks.py" &
job kernels-b 240 "$pytest tests/kernels/test_attention.py" &
job kernels-d 240 "$pytest tests/kernels/test_rows.py" &
job kernels-e 240 "$pytest tests/kernels/test_projections.py tests/kernels/test_sampling_kernels.py" &
job kernels-f 240 "$pytest tests/kernels/test_{head,draft,machinery}.py -k 'not test_speed and not test_times'" &
job engine 240 "$pytest tests/gpu/test_cuda_engine.py" &
job loop-tests 240 "$pytest tests/gpu/test_loop.py" &
job weights 240 "$pytest tests/gpu/test_weights.py" &
job memcheck 240 "$(sanitize memcheck --seed 3)" &
job racecheck 240 "$(sanitize racecheck --temperature 0)" &
rm -rf "$out/qwen"
job qwen2-races 480 "$(packed) && $(sanitize memcheck --temperature 0 --model "$qwen") &&
    $(sanitize racecheck --temperature 0 --model "$qwen")" &
job qwen2-layers 480 "$pytest tests/kernels/test_qwen2_layers.py" &
job qwen2-kernels 480 "$pytest tests/kernels/test_qwen2_{chain,gemv,rows,attention,prefill}.py" &
job qwen2-memory 120 "$python -m tests.kernels.sanitize_qwen2_layers memcheck" &
job qwen2-blocks 480 "$pytest tests/gpu/test_qwen2_blocks.py" &
job qwen2-unit 480 "$python -m tools.check_qwen2 unit" &
job qwen2-layer 240 "$python -m tools.check_qwen2 layer" &
job qwen2-graph 240 "$python -m tools.check_qwen2 graph --log" &
job qwen2-engine 240 "$pytest tests/gpu/test_qwen2_cuda_engine.py tests/gpu/test_gpu_snapshots.py" &
job lengths 240 "$python -m tools.check_lengths --reference $references/lengths.npy --log &&
    $python -m tools.check_lengths --reference $references/lengths.npy --activations fp8 --tolerance 0.08 --log" &
answer() { echo "$python -m cuq1.generate --device $1 --temperature 0 --chat 'Write a Python function is_even' --max-tokens 200"; }
job answer 90 "$(answer cpu) > $out/cpu.txt && $(answer cuda) > $out/cuda.txt && cmp $out/cpu.txt $out/cuda.txt && wc $out/cuda.txt" &
job greedy 240 "$python -m tools.check_cuda greedy score --jobs 2 --log &&
    $python -m tools.check_cuda score --decode --activations fp8 --tolerance 0.08 --source-tokens 12000 --jobs 2 --log &&
    $python -m tools.check_cuda score --decode --source-tokens 12000 --jobs 2 --log" &
job server 480 "CUQ1_TEST_DEVICE=cuda $pytest tests/serve" &
job clients 400 "$python -m tools.soak_serve --device cuda --max-queue 8" &
job acceptance 240 "$python -m tools.check_cuda acceptance --rounds 2000 --jobs 4 --log" &
wait
job equal 120 "$python -m tools.check_loop equal --log" &
job ends 120 "$python -m tools.check_loop ends stall --log" &
job distribution 240 "$python -m tools.check_loop distribution --log" &
wait
job round 60 "$python -m tools.bench_round --rows 4..8 --kernels --marginal"
job sweep 60 "$python -m tools.bench_round --context sweep --experts 37.7"
job capacity 60 "$python -m tools.bench_capacity --capacity 1024,1024,262144 --log"
job speed 90 "$python -m tests.kernels.speed_attention; $python -m tests.kernels.prefill_speed prompt;
    $pytest -s tests/kernels/test_head.py tests/kernels/test_machinery.py -k 'test_speed or test_times'"
job repeat 120 "$python -m tools.check_cuda repeat --rounds 10000 --log"
job gap 60 "$python -m tools.check_loop gap --log && $python -m tools.bench_loop --log"
job drafting 60 "$python -m tools.check_loop drafting --log"
job timeline 40 "$python -m tools.trace_round --out $out/timeline"
job qwen2-speed 240 "$pytest tests/gpu/test_qwen2_tools.py && $python -m tools.bench_e2e --config qwen2.5-coder-7b --context 16384 --log &&
    $python -m tools.bench_e2e --config qwen2.5-coder-1.5b qwen2.5-coder-0.5b --log"
job million 240 "$python -m tools.check_loop million --log"
if [ "$(nvidia-smi --list-gpus | wc -l)" -ge 2 ]; then
    job exchange 120 "$python -m tools.check_exchange --log"
    job exchange-mem 60 "$python -m tools.check_exchange --sanitizer memcheck --exchanges 600"
    job exchange-race 60 "$python -m tools.check_exchange --sanitizer racecheck --exchanges 600 many places cancelling nan"
    job exchange-speed 60 "$python -m tools.bench_exchange --log"
    job ranks 240 "$pytest tests/multigpu"
fi
sort -u "$failures" | sed 's/^/failed: /'
[ ! -s "$failures" ]
