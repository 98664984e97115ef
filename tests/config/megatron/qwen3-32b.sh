#!/bin/bash
# Qwen3-32B on 256 GPUs, the paper's layout, with what Megatron's Muon does if no mode is given.
TP=${TP:-8}; NNODES=${NNODES:-32}
ARGS="
  --num-layers 64 --hidden-size 5120 --ffn-hidden-size 25600 --num-attention-heads 64
  --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm --swiglu --normalization RMSNorm
  --norm-epsilon 1e-6 --position-embedding-type rope --rotary-base 1000000 --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-32B
  --tensor-model-parallel-size $TP --sequence-parallel --micro-batch-size 1 --global-batch-size 256
  --seq-length 4096 --max-position-embeddings 4096 --recompute-granularity full --recompute-method uniform
  --recompute-num-layers 1 --train-iters 20000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine
  --lr-warmup-iters 500 --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
  --optimizer muon --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --tp-comm-overlap --data-path /data/fineweb_text_document --split 99,1,0
  --save /ckpt --save-interval 500 --log-interval 10 --spike-skip-threshold 6 --enable-telemetry
"
torchrun --nproc-per-node=8 --nnodes=$NNODES --rdzv-backend=c10d pretrain_gpt.py $ARGS ${EXTRA_ARGS}
