#!/usr/bin/env bash
# Makes this folder's records of a GPU again, as the README quotes them; each file is written as it is measured.
#
#   benchmarks/records.sh [NAME ...]              without a name: all that one GPU can make (about 45 minutes on an H200)
#   benchmarks/records.sh --forecast [NAME ...]   what `stepgraph plan` says of the rows over several GPUs, without one
#   benchmarks/records.sh --dry [NAME ...]        the same rows in small, on gloo ranks of a CPU: that they run
#   OUT=FOLDER PYTHON=PROGRAM GPU=h100            where the files go (benchmarks), what runs them (.venv/bin/python, or
#                                                 python3), the kind of GPU (h200)
#
# QuACK and Liger (for norms) and torchtitan (for train) are measured where they can be imported.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks}
GPU=${GPU:-h200}
MODE=measure
case ${1:-} in --dry | --forecast) MODE=${1#--} && shift ;; esac
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# Short and long rows, few and many, powers of two and the widths of models.
RMS_SHAPES=1048576x64,131072x64,524288x128,65536x128,262144x192,40000x192,262144x256,65536x256,32768x256,4096x256
RMS_SHAPES+=,131072x384,20000x384,65536x512,16384x512,65536x768,10922x768,65536x1024,8192x1024,1024x1024,65536x1536,5461x1536
RMS_SHAPES+=,65536x2048,4096x2048,512x2048,32768x3072,2730x3072,65536x4096,16384x4096,2048x4096,64x4096,1x4096,32768x5120
RMS_SHAPES+=,1638x5120,16384x6144,1365x6144,16384x7168,1170x7168,16384x8192,1024x8192,128x8192,16384x12288,682x12288
RMS_SHAPES+=,16384x14336,585x14336,32768x16384,512x16384,16384x32768,256x32768,8192x65536,128x65536,4096x131072,64x131072
LAYER_SHAPES=65536x256,1024x1024,65536x1024,4096x2048,16384x4096,65536x4096,16384x8192,32768x16384,16384x32768,8192x65536
COMPILED_SHAPES=65536x256,65536x512,65536x1024,65536x2048,4096x2048,16384x4096,65536x4096,16384x8192,16384x16384
TUNED_SHAPES=65536x256,524288x128,65536x512,65536x1024,4096x2048,16384x4096,65536x4096,16384x8192,32768x16384,8192x65536
TUNED_SHAPES+=,4096x131072
RULES=compile,compile-no-mix-order,compile-guard,compile-tuned,stepgraph
FP8=compile,compile-torchao-fp8-tensorwise,stepgraph-cudnn,stepgraph,stepgraph-fp8-tensorwise,stepgraph-fp8-rowwise
NORMS=stepgraph,stepgraph-norm-kernel,stepgraph-norm-inductor,stepgraph-norm-eager

# Batches of a data-parallel rank: of llama3-1b, llama3-8b, deepseek-v3-16b with 10 of its 27 layers, and whole: on four
# H200s a batch of 4 would not fit.
B1="--batch-size 4 --seq-len 4096"
B8="--batch-size 1 --seq-len 8192 --steps 12"
B16_10="--batch-size 4 --seq-len 4096 --steps 12"
B16="--batch-size 2 --seq-len 4096 --steps 12"
SYMMETRIC="--expert-exchange symmetric --expert-chunks 2"

stepgraph() { "$PYTHON" -m stepgraph "$@"; }

norm() { # FILE [OPTION ...]
  stepgraph bench norm "${@:2}" --json "$OUT/${GPU}_$1.json"
}

step() { # FILE PRESET [OPTION ...]
  stepgraph bench step "${@:2}" --json "$OUT/${GPU}_$1.json"
}

train() { # FILE PRESET [OPTION ...]: torchtitan's launcher sets expandable segments, so stepgraph has them too
  case $MODE in
    measure)
      PYTORCH_ALLOC_CONF=expandable_segments:True stepgraph bench train "${@:2}" --precision bf16 --timeout 900 \
        --json "$OUT/${GPU}_train_$1.json" ;;
    forecast)
      without "--steps --providers" "${@:2}"
      stepgraph plan "${WORDS[@]}" --precision bf16 --memory none --gpu "$GPU" --json "$OUT/forecast_$1.json" ;;
    dry)
      case $2 in
        deepseek*) preset="deepseek-v3-debug" ;;
        *) preset="llama3-debug --model.n-kv-heads 2" ;;
      esac
      without "--model.n-layers --batch-size --seq-len --steps" "${@:3}"
      stepgraph bench train $preset "${WORDS[@]}" --precision bf16 --batch-size 1 --seq-len 64 --steps 2 \
        --model.n-layers 4 --device cpu --timeout 900 --json "$OUT/dry_$1.json" ;;
  esac
}

balanced() { # FILE PRESET [OPTION ...]: what a forecast assumes
  if [ $MODE = forecast ]; then train "$@"; else train "$@" --balanced-routing; fi
}

without() { # OPTIONS WORD ...: WORDS are the words without these options and their values
  local left=" $1 " && shift
  WORDS=()
  while [ $# -gt 0 ]; do
    case $left in *" $1 "*) shift 2 ;; *) WORDS+=("$1") && shift ;; esac
  done
}

plot() { # FILE
  [ $MODE != measure ] || "$PYTHON" benchmarks/plot.py "$OUT/${GPU}_$1.json" "$OUT/${GPU}_$1.png"
}

record() {
  case $1 in
    rms_norm)
      norm rms_norm --op rms_norm --providers ours,eager,quack,liger --shapes "$RMS_SHAPES"
      plot rms_norm ;;
    layer_norm)
      norm layer_norm --op layer_norm --providers ours,eager,quack,liger --shapes "$LAYER_SHAPES"
      plot layer_norm ;;
    compiled_norms)
      norm compiled_norms --op rms_norm --providers ours,quack,compile,compile-tuned --shapes "$COMPILED_SHAPES" ;;
    rms_norm_inductor) # max-autotune: 50 seconds a shape
      norm rms_norm_inductor --op rms_norm --providers ours,eager,compile,compile-max-autotune,liger \
        --shapes "$TUNED_SHAPES" ;;
    regional) "$PYTHON" benchmarks/regional.py llama3-8b --json "$OUT/h200_regional.json" ;;
    guard) "$PYTHON" benchmarks/guard.py --blocks 11 13 24 --json "$OUT/h200_guard.json" ;; # those whose kernels spill
    golf)
      step golf golf --providers eager,compile,compile-max-autotune,stepgraph --steps 16
      plot golf ;;
    golf_rules) step golf_rules golf --precision bf16-autocast --providers "$RULES" ;;
    golf_scaled) step golf_scaled golf --model.residual-scales --precision bf16-autocast --providers "$RULES" ;;
    golf_norms) step golf_norms golf --precision bf16-autocast --providers "$NORMS" ;;
    llama3-1b) step llama3-1b llama3-1b --providers eager,compile,compile-max-autotune,stepgraph --steps 6 --repeats 3 ;;
    llama3-1b_norms) step llama3-1b_norms llama3-1b --providers "$NORMS" --steps 6 --repeats 3 ;;
    1b_fsdp1) train 1b_fsdp1 llama3-1b --mesh fsdp=1 $B1 --providers stepgraph --steps 40 ;;
    1b_fsdp[248]) train "$1" llama3-1b --mesh "fsdp=${1#1b_fsdp}" $B1 --providers stepgraph --steps 40 ;;
    1b_fsdp2_muon) train "$1" llama3-1b --mesh fsdp=2 --optimizer muon $B1 --providers stepgraph --steps 40 ;;
    1b_fsdp[248]_copies)
      n=${1#1b_fsdp}
      train "$1" llama3-1b --mesh "fsdp=${n%_copies}" --copy-engines $B1 --providers stepgraph --steps 40 ;;
    8b_fsdp2_reshard) train "$1" llama3-8b --mesh fsdp=2 --reshard always $B8 ;;
    8b_fsdp2 | 8b_fsdp8)
      train "$1" llama3-8b --mesh "fsdp=${1#8b_fsdp}" --copy-engines $B8
      plot "train_$1" ;;
    8b_fsdp2_tp2_nccl) train "$1" llama3-8b --mesh fsdp=2,tp=2 $B8 ;;
    8b_fsdp[24]_tp2)
      n=${1#8b_fsdp}
      train "$1" llama3-8b --mesh "fsdp=${n%_tp2},tp=2" --async-tp --copy-engines $B8
      plot "train_$1" ;;
    8b_fsdp[28]_fp8)
      n=${1#8b_fsdp}
      train "$1" llama3-8b --mesh "fsdp=${n%_fp8}" --fp8 tensorwise --copy-engines $B8 ;;
    8b_fsdp[24]_tp2_fp8)
      n=${1#8b_fsdp}
      train "$1" llama3-8b --mesh "fsdp=${n%_tp2_fp8},tp=2" --fp8 tensorwise $B8 ;;
    16b10_ep2)
      train "$1" deepseek-v3-16b --model.n-layers 10 --mesh fsdp=2,ep=2 $SYMMETRIC $B16_10
      plot "train_$1" ;;
    16b10_ep2_fp8)
      train "$1" deepseek-v3-16b --model.n-layers 10 --mesh fsdp=2,ep=2 $SYMMETRIC $B16_10 --fp8 rowwise --fp8-experts \
       --providers stepgraph ;;
    16b10_ep2_nccl) train "$1" deepseek-v3-16b --model.n-layers 10 --mesh fsdp=2,ep=2 $B16_10 --providers stepgraph ;;
    16b10_ep2_balanced) balanced "$1" deepseek-v3-16b --model.n-layers 10 --mesh fsdp=2,ep=2 $SYMMETRIC $B16_10 ;;
    16b_ep[48]) train "$1" deepseek-v3-16b --mesh "fsdp=${1#16b_ep},ep=${1#16b_ep}" $B16 ;;
    16b_ep[48]_balanced)
      n=${1#16b_ep} && n=${n%_balanced}
      balanced "$1" deepseek-v3-16b --mesh "fsdp=$n,ep=$n" $B16 ;;
    models_3b) # compile and Liger beside; the others of the README's table by name: stepgraph bench model NAME ...
      stepgraph bench model smollm3-3b --providers compile,liger,stepgraph --together 3 --json "$OUT/${GPU}_smollm3.json" ;;
    grouped) "$PYTHON" benchmarks/grouped.py --json "$OUT/${GPU}_grouped.json" ;;
    expert_swiglu) "$PYTHON" benchmarks/expert_swiglu.py --json "$OUT/${GPU}_expert_swiglu.json" ;;
    random_norms)
      norm rms_norm_random --op rms_norm --providers ours,eager,quack,liger --shapes random
      norm layer_norm_random --op layer_norm --providers ours,eager,quack,liger --shapes random ;;
    squares)
      norm compiled_squares --op rms_norm --providers ours,eager,compile-tuned \
        --shapes 16384x16384,8192x8192,4096x4096 ;;
    warm_start) "$PYTHON" benchmarks/warm_start.py qwen3-0.6b --json "$OUT/${GPU}_warm_start.json" ;;
    save_stall) # what one of two GPUs holds of llama3-8b; a disk with room for one checkpoint of 49 GB, in TMPDIR
      "$PYTHON" benchmarks/save_stall.py llama3-8b --model.n-layers 14 --mesh fsdp=1 --touch-gib 100 \
        --rows behind unprepared wait --json "$OUT/${GPU}_save_stall.json" ;;
    fp8)
      step fp8 llama3-1b $B1 --precision bf16 --repeats 3 --together 4 --providers "$FP8" ;;
    golf_fa4) step golf_fa4 golf --steps 16 --repeats 3 --together 3 --providers compile,stepgraph-cudnn,stepgraph-fa4 ;;
    fp8_curve)
      "$PYTHON" benchmarks/fp8_curve.py llama3-debug --device cuda --at-once 9 --recipes tensorwise rowwise \
        --json "$OUT/fp8_curve_100m.json" --train "--checkpoint-every 0 --seq-len 512 --model.dim 768 --model.n-layers 14 \
        --model.n-heads 12 --model.n-kv-heads 12 --model.ffn-dim 2048" ;;
    1b_pp2) train "$1" llama3-1b --no-model.tie-embeddings --mesh pp=2 --accumulate 8 --seq-len 4096 --batch-size 1 --steps 12 ;;
    8b_pp2) train "$1" llama3-8b --mesh pp=2 --accumulate 8 $B8 ;;
    8b_pp2_symmetric) train "$1" llama3-8b --mesh pp=2 --accumulate 8 --pipeline interleaved --stage-sends symmetric $B8 ;;
    8b_pp4) train "$1" llama3-8b --mesh pp=4 --accumulate 8 $B8 ;;
    8b_pp2_fsdp2) train "$1" llama3-8b --mesh pp=2,fsdp=2 --accumulate 8 $B8 ;;
    8b_pp2_fsdp2_tp2) train "$1" llama3-8b --mesh pp=2,fsdp=2,tp=2 --accumulate 8 $B8 ;;
    ranks) # the tests of ranks and of their faults with NCCL, on all GPUs that there are
      [ $MODE = measure ] && "$PYTHON" -m pytest -q tests/gpu -k "ranks or faults or pipeline" ;;
    *)
      echo "error: no record is called $1; there are: $ONE_GPU $MORE_GPUS" >&2
      exit 2 ;;
  esac
}

ONE_GPU="rms_norm layer_norm compiled_norms regional guard golf golf_rules golf_scaled golf_norms"
ONE_GPU+=" llama3-1b_norms 1b_fsdp1 llama3-1b rms_norm_inductor random_norms squares grouped expert_swiglu models_3b warm_start save_stall fp8 golf_fa4 fp8_curve"
TWO="1b_fsdp2 1b_fsdp2_muon 1b_fsdp2_copies 8b_fsdp2 8b_fsdp2_reshard 8b_fsdp2_fp8 16b10_ep2 16b10_ep2_nccl 16b10_ep2_balanced 1b_pp2 8b_pp2 8b_pp2_symmetric"
FOUR="1b_fsdp4 1b_fsdp4_copies 8b_fsdp2_tp2 8b_fsdp2_tp2_nccl 8b_fsdp2_tp2_fp8 16b_ep4 16b_ep4_balanced 8b_pp4 8b_pp2_fsdp2"
EIGHT="1b_fsdp8 1b_fsdp8_copies 8b_fsdp4_tp2 8b_fsdp8 8b_fsdp4_tp2_fp8 8b_fsdp8_fp8 16b_ep8 16b_ep8_balanced 8b_pp2_fsdp2_tp2"
MORE_GPUS="$TWO $FOUR $EIGHT ranks"
[ $# -gt 0 ] || set -- $([ $MODE = measure ] && echo "$ONE_GPU" || echo "$TWO $FOUR $EIGHT")
for name in "$@"; do
  record "$name"
done
