#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
# Qwen3-30B-A3B on 16 H100, with the layout of Megatron-Bridge's performance card and layer-wise Muon.
MODEL_ARGS=(
   --disable-bias-linear
   --qk-layernorm
   --group-query-attention
   --num-attention-heads 32
   --num-query-groups 4
   --kv-channels 128
   --num-layers 48
   --hidden-size 2048
   --ffn-hidden-size 6144
   --normalization RMSNorm
   --position-embedding-type rope
   --norm-epsilon 1e-6
   --rotary-percent 1.0
   --swiglu
   --untie-embeddings-and-output-weights
   --vocab-size 151936
   --rotary-base 1000000
   --attention-dropout 0 --hidden-dropout 0
   --moe-ffn-hidden-size 768
   --moe-router-score-function softmax
   --moe-router-topk-scaling-factor 1.0
   --moe-token-dispatcher-type flex
   --moe-flex-dispatcher-backend hybridep
   --moe-router-topk 8
   --moe-layer-freq '([1]*48)'
   --num-experts 128
   --moe-grouped-gemm
   --moe-router-dtype fp32
   --moe-permute-fusion
   --moe-router-load-balancing-type global_aux_loss
   --moe-aux-loss-coeff 1e-3
)
run_cmd="python -u pretrain_gpt.py ${MODEL_ARGS[@]} \
    --tensor-model-parallel-size 1 --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 \
    --overlap-moe-expert-parallel-comm --micro-batch-size 1 --global-batch-size 1024 --seq-length 4096 \
    --max-position-embeddings 40960 --train-iters 1000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style WSD \
    --lr-wsd-decay-iters 100 --lr-wsd-decay-style linear --lr-warmup-fraction 0.05 --weight-decay 0.1 \
    --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --optimizer muon --muon-tp-mode duplicated --muon-momentum 0.95 \
    --muon-nesterov --muon-extra-scale-factor 0.2 --use-distributed-optimizer --overlap-grad-reduce \
    --overlap-param-gather --cuda-graph-impl transformer_engine --tokenizer-model Qwen/Qwen3-30B-A3B"
srun -l --container-image=/images/nemo.sqsh sh -c "${run_cmd}"
