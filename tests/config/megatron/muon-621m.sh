#!/bin/bash
# The arguments of Megatron-LM's example of distributed Muon, a model of 621M parameters.
GPUS_PER_NODE=8
NUM_NODES=1
TOKENIZER_MODEL=/data/c4/tokenizer
DATA_PATH=/data/c4/c4-train.en_6_text_document
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --master_addr localhost --master_port 6000)
GQA_ARGS=(--group-query-attention --num-attention-heads 16 --num-query-groups 8 --kv-channels 128)
MLP_ARGS=(--squared-relu --num-layers 24 --hidden-size 1024 --ffn-hidden-size 4096 --normalization RMSNorm)
OPT_ARGS=(
    --micro-batch-size 1
    --global-batch-size 512
    --optimizer dist_muon
    --lr-warmup-samples 2048000

    --train-samples 24414062
    --lr-decay-samples 23193359
    --lr 1.0e-3
    --min-lr 1.0e-5
    --weight-decay 0.1
    --clip-grad 1.0
    --init-method-std 0.02
    --lr-decay-style cosine
    --muon-scale-mode spectral
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model $TOKENIZER_MODEL
    --data-path $DATA_PATH
)
options=(
    --attention-backend flash
    --distributed-timeout-minutes 2
    --no-mmap-bin-files
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 1.0
    ${MLP_ARGS[@]}
    ${GQA_ARGS[@]}
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --exit-duration-in-mins 230
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --seq-length 4096
    --max-position-embeddings 4096
    --log-interval 10
    --eval-iters 10
    --save-interval 50
    --ckpt-format torch_dist
    --log-params-norm
    ${OPT_ARGS[@]}
    --bf16
    --manual-gc
    --log-straggler
    --check-weight-hash-across-dp-replicas-interval 20000
    --wandb-project "muon-test"
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${options[@]}
