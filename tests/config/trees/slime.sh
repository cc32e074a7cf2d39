#!/bin/bash
# The options of slime, as its scripts write them, with the values that its documentation gives them.
CKPT_ARGS=(
   --hf-checkpoint /root/Qwen3-4B
   --ref-load /root/Qwen3-4B_torch_dist
   --load /root/Qwen3-4B_slime/
   --save /root/Qwen3-4B_slime/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data /root/dapo-math-17k/dapo-math-17k.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rollout-seed 42
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-max-prompt-len 1024
   --rollout-max-context-len 16384
   --rollout-temperature 1
   --rollout-top-p 1.0
   --rollout-top-k -1
   --rollout-stop "</answer>"
   --rollout-stop-token-ids 2
   --rollout-skip-special-tokens
   --over-sampling-batch-size 64
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --partial-rollout
   --mask-offpolicy-in-partial-rollout
   --num-steps-per-rollout 1
   --global-batch-size 256
   --balance-data
   --rollout-function-path slime.rollout.sglang_rollout.generate_rollout
   --custom-generate-function-path my.generate
   --custom-rm-path my.reward
   --buffer-filter-path my.filter
)
EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime /root/aime-2024/aime-2024.jsonl
   --n-samples-per-eval-prompt 16
   --eval-max-response-len 16384
   --eval-temperature 1.0
   --eval-top-p 1
   --eval-top-k -1
   --skip-eval-before-train
)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
   --log-probs-chunk-size -1
   --recompute-loss-function
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --kl-coef 0.00
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
   --use-tis
   --tis-clip 2.0
   --tis-clip-low 0
   --normalize-advantages
   --disable-rewards-normalization
   --calculate-per-token-loss
)
OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --lr-warmup-iters 0
   --min-lr 0
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
   --adam-eps 1e-8
   --clip-grad 1.0
)
WANDB_ARGS=(
   --use-wandb
   --wandb-project slime-dev
   --wandb-group qwen3-4B
   --wandb-key KEY
)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
   --sglang-max-running-requests 512
)
MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
   --seed 1234
   --distributed-timeout-minutes 10
   --update-weight-buffer-size 536870912
   --freeze-params-name-list embedding
   --use-fault-tolerance
)
ray job submit --address="http://127.0.0.1:8265" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 8 \
   --num-gpus-per-node 8 \
   --rollout-num-gpus 8 \
   --colocate \
   ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} ${PERF_ARGS[@]} ${SGLANG_ARGS[@]}
