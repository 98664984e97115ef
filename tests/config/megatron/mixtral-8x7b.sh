# The arguments of Megatron-LM's examples/mixtral/train_mixtral_8x7b_distributed.sh.
NNODES=${SLURM_NNODES:-"1"}
MOE_ARGS=(
    --num-experts 2
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
#    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --overlap-param-gather
    --overlap-grad-reduce
)
LOGGING_ARGS=(
  #  --log-interval 1 \
    --eval-iters 10 \
    #--tensorboard-dir "${CHECKPOINT_PATH}/tensorboard" \
    --no-load-optim \
    --no-load-rng
)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(--wandb-project ${WANDB_PROJECT:-"Mixtral"})
fi
torchrun --nproc_per_node 2 --nnodes $NNODES pretrain_gpt.py \
    --use-mcore-models --disable-bias-linear --seq-length 256 --max-position-embeddings 2048 --num-layers 2 \
    --hidden-size 256 --ffn-hidden-size 896 --num-attention-heads 2 --init-method-std 0.01 --attention-dropout 0.0 \
    --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu \
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --no-masked-softmax-fusion \
    --no-position-embedding --rotary-base 1000000 ${MOE_ARGS[@]} --tokenizer-type Llama2Tokenizer --mock-data \
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --train-iters 7 --min-lr 1.0e-5 --weight-decay 0.1 \
    --clip-grad 1.0 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 2 \
    --use-distributed-optimizer --sequence-parallel ${LOGGING_ARGS[@]} 2>&1 | tee log.txt
