"""The names that other trainers give to options: what each is called here, and what its value becomes.

A name that means something else here, or that nothing here does, says so. Imports no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

TRL, VERL, PRIME, OPENRLHF, FAST, PIPELINE, SLIME, TRANSFORMERS, DEEPSPEED = (
    "TRL",
    "verl",
    "prime-rl",
    "OpenRLHF",
    "Fast-LLM",
    "PipelineRL",
    "slime",
    "transformers",
    "DeepSpeed",
)


@dataclass(frozen=True)
class Foreign:
    """An option of other trainers. Example: `max_steps` of TRL, here `schedule.steps`."""

    owners: tuple[str, ...]
    option: str | None  # here; None: there is none
    note: str = ""
    convert: Callable[[Any], Any] | None = None  # from its value to ours; None: the value stays

    def explain(self, name: str, value: Any) -> str:
        """Say what to write in place of this option."""
        whose = f"it is an option of {_join(self.owners)}"
        if self.option is None:
            return f"{whose}, and truestep has none like it{f': {self.note}' if self.note else ''}"
        example = self._example(value)
        return f"{whose}; write {self.option}{example}{f' ({self.note})' if self.note else ''}"

    def _example(self, value: Any) -> str:
        """Give our value where the foreign one is a plain value that can be converted."""
        if not isinstance(value, bool | int | float | str) or self.convert is _UNKNOWN:
            return ""
        try:
            ours = self.convert(value) if self.convert else value
        except (TypeError, ValueError, ArithmeticError, KeyError, AttributeError):
            return ""
        return f": {_shown(ours)}"


def _UNKNOWN(value: Any) -> Any:  # noqa: N802 - a marker: our value does not follow from theirs alone
    raise ValueError


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _null_if_zero(value: float) -> float | None:
    return value or None


def _same_unless_off(value: float) -> float | None:
    return None if value in (-1, 0) else value


_SCALES = {"group": "group_normalized", "none": "group_mean", "batch": "batch_normalized"}
_SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine", "linear": "linear"}
_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}
_AGGREGATIONS = {
    "token-mean": "labels",
    "seq-mean-token-mean": "document_means",
    "seq-mean-token-sum": "documents",
    "seq-mean-token-sum-norm": "constant",
}
# TRL's loss_type: the loss, and what it is divided by.
_LOSSES = {
    "grpo": "document_means",
    "dapo": "labels",
    "bnpo": "labels",
    "dr_grpo": "constant",
    "cispo": "labels",
    "sapo": "document_means",
    "luspo": "documents",
}


_VERL_ADVANTAGES = {
    "grpo": "group_normalized",
    "rloo": "leave_one_out",
    "opo": "length_weighted",
    "reinforce_plus_plus_baseline": "batch_normalized",
}


def _states(value: Any) -> str:
    return "states" if value else "none"


def _scale(value: Any) -> str:
    return _SCALES[{True: "group", False: "none"}.get(value, value)]


def _dtype(value: Any) -> str:
    return _DTYPES[value] if isinstance(value, str) else "bfloat16" if value else "float32"


def _attention(value: Any) -> str:
    return "torch" if str(value) in ("eager", "sdpa") else "auto"


_BATCH = "a step is a number of documents, however they are split over ranks and micro-batches"
_PACKED = "documents are packed by tokens, so no batch has a number of rows"
_MEMORY = "memory is set by tokens, and the head's by model.head.logits_chunk_size"

# The files that the names were read in, and their commits.
READ = {
    TRL: "`trl/trainer/grpo_config.py` at 006d32c (those of its PPO, SFT and models: of earlier versions)",
    VERL: "`verl/trainer/config/_generated_ppo_trainer.yaml` at 01d4d76, `algorithm.py` at 0482624",
    PRIME: "`src/prime_rl/configs/trainer.py` at 6deea63, `orchestrator.py` at 0083212; `dppo_mask_*` in later ones",
    OPENRLHF: "`openrlhf/cli/train_ppo_ray.py` at 021d1b0",
    SLIME: "`slime/utils/arguments.py` at f4fcce8; Megatron's own options are Megatron's",
    FAST: "`fast_llm/layers/language_model/loss/config.py` at 014ba59",
    PIPELINE: "`pipelinerl/finetune/rl/__init__.py` at 005a1f1",
}

FOREIGN: dict[str, Foreign] = {
    # The objective
    "clip_ratio": Foreign((VERL,), "loss.epsilon_low and loss.epsilon_high"),
    "eps_clip_low_high": Foreign((OPENRLHF,), "loss.epsilon_low and loss.epsilon_high", "", _UNKNOWN),
    "eps_clip": Foreign((OPENRLHF, SLIME), "loss.epsilon_low and loss.epsilon_high"),
    "cliprange": Foreign((TRL,), "loss.epsilon_low and loss.epsilon_high", "of its PPO"),
    "clip_ratio_low": Foreign((VERL,), "loss.epsilon_low"),
    "clip_ratio_high": Foreign((VERL,), "loss.epsilon_high"),
    "eps_clip_high": Foreign((SLIME,), "loss.epsilon_high"),
    "clip_ratio_c": Foreign((VERL,), "loss.dual_clip", "3 there if it is not given"),
    "eps_clip_c": Foreign((SLIME,), "loss.dual_clip"),
    "delta": Foreign((TRL,), "loss.dual_clip", "the same where it is at least 1 + epsilon_high"),
    "loss_type": Foreign(
        (TRL,),
        "loss.normalize_by",
        "and loss.type: cispo and sapo have the same name, luspo is gspo, all others are grpo",
        lambda value: _LOSSES[value],
    ),
    "policy_loss": Foreign(
        (PIPELINE, FAST),
        "loss.type",
        "divided by the step's documents in PipelineRL: loss.normalize_by: documents",
        lambda value: {"ppo": "grpo", "grpo": "grpo", "gspo": "gspo", "reinforce": "reinforce"}[value],
    ),
    "policy_loss_type": Foreign((OPENRLHF,), "loss.type", "", lambda value: {"ppo": "grpo", "gspo": "gspo"}[value]),
    "normalize_by_documents": Foreign(
        (FAST,), "loss.normalize_by", "", lambda value: "documents" if value else "labels"
    ),
    "calculate_per_token_loss": Foreign(
        (SLIME,), "loss.normalize_by", "", lambda value: "labels" if value else "document_means"
    ),
    "loss_agg_mode": Foreign(
        (VERL,),
        "loss.normalize_by",
        "constant needs loss.max_labels, and is divided by the documents too",
        lambda value: _AGGREGATIONS[value],
    ),
    "importance_sampling_level": Foreign(
        (TRL,), "loss.type", "", lambda value: {"token": "grpo", "sequence": "gspo"}[value]
    ),
    "adv_estimator": Foreign((VERL,), "data.advantages", "", lambda value: _VERL_ADVANTAGES[value]),
    "advantage_estimator": Foreign(
        (OPENRLHF, SLIME),
        "data.advantages",
        "",
        lambda value: {
            "grpo": "group_normalized",
            "group_norm": "group_normalized",
            "rloo": "leave_one_out",
            "dr_grpo": "group_mean",
            "reinforce_baseline": "batch_normalized",
            "reinforce_plus_plus_baseline": "batch_normalized",
        }[value],
    ),
    "scale_rewards": Foreign((TRL,), "data.advantages", "", _scale),
    "norm_adv_by_std_in_grpo": Foreign((VERL,), "data.advantages", "", _scale),
    "entropy_coeff": Foreign((VERL,), "loss.entropy_bonus"),
    "divide_advantage_by_std": Foreign((PIPELINE,), "data.advantages", "", _scale),
    "entropy_coef": Foreign(
        (TRL, SLIME), "loss.entropy_bonus", "TRL takes the mean over labels always: loss.entropy_normalize_by: labels"
    ),
    "use_adaptive_entropy": Foreign(
        (TRL,), "loss.entropy_target.entropy", "the weight moves by the distance from it", _UNKNOWN
    ),
    "entropy_coef_delta": Foreign((TRL,), "loss.entropy_target.rate", "times the distance from the target", _UNKNOWN),
    "entropy_coef_max": Foreign((TRL,), "loss.entropy_target.largest_weight"),
    "top_entropy_quantile": Foreign((TRL,), None, "a loss of your own may weigh labels by labels.entropy"),
    "clip_cov_ratio": Foreign((VERL,), "loss.clip_cov.share"),
    "clip_cov_lb": Foreign((VERL,), "loss.clip_cov.low"),
    "clip_cov_ub": Foreign((VERL,), "loss.clip_cov.high"),
    "kl_cov_ratio": Foreign((VERL,), "loss.kl_cov.share"),
    "ppo_kl_coef": Foreign(
        (VERL,), "loss.kl_cov.weight", "of another estimate: abs(log ρ) there, ρ - log ρ - 1 here", _UNKNOWN
    ),
    "entropy_loss_coef": Foreign((OPENRLHF,), "loss.entropy_bonus"),
    "cast_lm_head_to_fp32": Foreign(
        (TRL,), "model.head.fp32_lm_head", "the logits are float32 without a float32 copy of the weight"
    ),
    # Corrections, the reference, and what a step is made of
    "beta": Foreign(
        (TRL,),
        "loss.kl_reference.weight",
        "0 in TRL: leave the section out; from 1.16 on with loss.kl_reference.estimator: unbiased, unless "
        "use_bias_correction_kl is false",
    ),
    "kl_loss_coef": Foreign((VERL, SLIME), "loss.kl_reference.weight"),
    "kl_coef": Foreign(
        (VERL, SLIME, PIPELINE),
        "loss.kl_reference.weight",
        "with loss.kl_reference.in: reward; in PipelineRL it is of the loss, and 0.1 if it is not given",
    ),
    "init_kl_coef": Foreign(
        (OPENRLHF,), "loss.kl_reference.weight", "with loss.kl_reference.in: reward, unless use_kl_loss is set"
    ),
    "kl_estimator": Foreign((OPENRLHF,), "loss.kl_reference.estimator"),
    "use_unbiased_kl": Foreign(
        (SLIME,), "loss.kl_reference.estimator", "", lambda value: "unbiased" if value else "k3"
    ),
    "use_bias_correction_kl": Foreign(
        (TRL,), "loss.kl_reference.estimator", "", lambda value: "unbiased" if value else "k3"
    ),
    "kl_loss_type": Foreign(
        (VERL, SLIME),
        "loss.kl_reference.estimator",
        "",
        lambda value: {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}[value],
    ),
    "ref_load": Foreign((SLIME,), "loss.kl_reference.path"),
    "vllm_importance_sampling_cap": Foreign(
        (TRL,), "loss.correction.high", "with loss.old_logprobs: recompute, and the type and level of its mode"
    ),
    "vllm_importance_sampling_clip_max": Foreign(
        (TRL,), "loss.correction.high", "with loss.old_logprobs: recompute, and the type and level of its mode"
    ),
    "vllm_importance_sampling_clip_min": Foreign((TRL,), "loss.correction.low"),
    "vllm_importance_sampling_correction": Foreign(
        (TRL,), "loss.correction.type", "and level and high, with loss.old_logprobs: recompute", _UNKNOWN
    ),
    "tis_clip_low": Foreign((SLIME,), "loss.correction.low"),
    "use_tis": Foreign(
        (SLIME,), "loss.correction.type", "truncate, with level: label and high: tis_clip, as preset: tis", _UNKNOWN
    ),
    "use_kl_loss": Foreign((VERL, SLIME), "loss.kl_reference.weight", "the value of kl_loss_coef", _UNKNOWN),
    "use_kl_in_reward": Foreign((VERL,), "loss.kl_reference.weight", "the value of kl_coef, with in: reward", _UNKNOWN),
    "kl_tau": Foreign((PRIME,), None, "a term weight · log(ρ)²; a loss of your own can have it (loss.type: custom)"),
    "vllm_importance_sampling_mode": Foreign(
        (TRL,),
        "loss.correction.type and loss.correction.level",
        "token is level: label, sequence is level: document; sequence_mask if it is not given",
        _UNKNOWN,
    ),
    "rollout_is": Foreign(
        (VERL,), "loss.correction.level", "", lambda value: {"token": "label", "sequence": "document"}[value]
    ),
    "rollout_is_threshold": Foreign(
        (VERL,), "loss.correction.high", "with type: truncate; a pair lower_upper is type: mask with low and high"
    ),
    "rollout_rs": Foreign(
        (VERL,), "loss.correction.type", "reject: token_k1, seq_sum_k1, seq_mean_k1 are the three levels", _UNKNOWN
    ),
    "vllm_is_truncated_threshold": Foreign(
        (OPENRLHF,), "loss.correction.high", "with loss.correction.type: truncate and loss.old_logprobs: recompute"
    ),
    "tis_clip": Foreign(
        (SLIME,), "loss.correction.high", "with loss.correction.type: truncate and loss.old_logprobs: recompute"
    ),
    "off_policy_mask_threshold": Foreign((TRL,), "loss.off_policy_mask"),
    "opsm_delta": Foreign((SLIME,), "loss.off_policy_mask"),
    "dppo_mask_high": Foreign((PRIME,), "loss.threshold", "with loss.type: dppo; one for both signs of the advantage"),
    "dppo_mask_low": Foreign((PRIME,), "loss.threshold", "with loss.type: dppo; one for both signs of the advantage"),
    "sapo_temperature_pos": Foreign((TRL,), "loss.tau_positive"),
    "sapo_temperature_neg": Foreign((TRL,), "loss.tau_negative"),
    "tau_pos": Foreign((VERL,), "loss.tau_positive"),
    "tau_neg": Foreign((VERL,), "loss.tau_negative"),
    "mask_truncated_completions": Foreign((TRL,), "data.truncated", "", lambda value: "mask" if value else "keep"),
    "overlong_filtering": Foreign((PIPELINE,), "data.truncated", "", lambda value: "mask" if value else "keep"),
    "filter_zero_advantage_groups": Foreign(
        (PIPELINE,), "data.zero_advantage", "skip computes nothing for them and still counts them", _UNKNOWN
    ),
    "filter_groups": Foreign(
        (VERL,), "data.zero_advantage", "replace: groups without a difference are sampled anew", _UNKNOWN
    ),
    "dynamic_filtering": Foreign((OPENRLHF,), "data.zero_advantage", "", lambda value: "replace" if value else "keep"),
    "overlong_buffer_cfg": Foreign((VERL,), "data.overlong_penalty", "from, to and weight", _UNKNOWN),
    "overlong_buffer_len": Foreign((OPENRLHF,), "data.overlong_penalty", "from, to and weight", _UNKNOWN),
    # The step
    "max_steps": Foreign((TRL, TRANSFORMERS, PRIME), "schedule.steps", "", _same_unless_off),
    "total_training_steps": Foreign((VERL,), "schedule.steps"),
    "num_rollout": Foreign((SLIME,), "schedule.steps", "a rollout there may be several steps: num_steps_per_rollout"),
    "num_train_epochs": Foreign(
        (TRL, TRANSFORMERS),
        "data.epochs",
        "for files; a run that samples ends at schedule.steps",
        lambda value: int(value),
    ),
    "total_epochs": Foreign((VERL,), "data.epochs", "for files; a run that samples ends at schedule.steps"),
    "num_episodes": Foreign((OPENRLHF,), "schedule.steps", "", _UNKNOWN),
    "num_iterations": Foreign((TRL,), "schedule.updates_per_batch"),
    "ppo_epochs": Foreign((VERL,), "schedule.updates_per_batch"),
    "max_epochs": Foreign((OPENRLHF,), "schedule.updates_per_batch"),
    "per_device_train_batch_size": Foreign(
        (TRL, TRANSFORMERS),
        "schedule.docs_per_step",
        f"for the whole step, and data.tokens_per_microbatch for memory: {_BATCH}",
        _UNKNOWN,
    ),
    "train_batch_size": Foreign(
        (VERL, OPENRLHF, DEEPSPEED),
        "schedule.docs_per_step",
        "verl counts prompts: multiply by data.group_size",
        _UNKNOWN,
    ),
    "global_batch_size": Foreign((SLIME,), "schedule.docs_per_step"),
    "rollout_batch_size": Foreign(
        (SLIME, OPENRLHF), "schedule.docs_per_step", "it counts prompts: multiply by data.group_size", _UNKNOWN
    ),
    "generation_batch_size": Foreign((TRL,), "schedule.docs_per_step", "and schedule.updates_per_batch"),
    "ppo_mini_batch_size": Foreign(
        (VERL,),
        "schedule.docs_per_step",
        "it counts prompts: multiply by data.group_size; every update is of a whole step's documents",
        _UNKNOWN,
    ),
    "gradient_accumulation_steps": Foreign((TRL, TRANSFORMERS, DEEPSPEED), "schedule.docs_per_step", _BATCH, _UNKNOWN),
    "micro_train_batch_size": Foreign((OPENRLHF,), "data.tokens_per_microbatch", _PACKED, _UNKNOWN),
    "ppo_micro_batch_size_per_gpu": Foreign((VERL,), "data.tokens_per_microbatch", _PACKED, _UNKNOWN),
    "ppo_max_token_len_per_gpu": Foreign((VERL,), "data.tokens_per_microbatch"),
    "max_tokens_per_gpu": Foreign((SLIME,), "data.tokens_per_microbatch"),
    "use_dynamic_bsz": Foreign((VERL,), None, f"it is always so; {_PACKED}"),
    "packing": Foreign((TRL,), None, "documents are always packed, and attention never crosses from one to another"),
    "padding_free": Foreign((TRL,), None, "documents are always packed, and nothing is padded"),
    # Sampling
    "num_generations": Foreign((TRL,), "data.group_size"),
    "n_samples_per_prompt": Foreign((OPENRLHF, SLIME), "data.group_size"),
    "rollouts_per_example": Foreign((PRIME,), "data.group_size"),
    "max_completion_length": Foreign((TRL,), "sampler.max_new_tokens"),
    "max_response_length": Foreign((VERL,), "sampler.max_new_tokens"),
    "rollout_max_response_len": Foreign((SLIME,), "sampler.max_new_tokens"),
    "generate_max_len": Foreign((OPENRLHF,), "sampler.max_new_tokens"),
    "max_prompt_length": Foreign(
        (VERL,), None, "a prompt is never cut; one that does not fit a micro-batch with its completion is refused"
    ),
    "reward_funcs": Foreign((TRL,), "sampler.reward", "one function, as package.module:name", _UNKNOWN),
    "custom_reward_function": Foreign((VERL,), "sampler.reward", "as package.module:name", _UNKNOWN),
    "rollout_temperature": Foreign((SLIME,), "sampler.temperature"),
    "use_vllm": Foreign(
        (TRL,),
        "sampler.type",
        "with sampler.urls: the addresses of the servers",
        lambda value: "server" if value else "in_process",
    ),
    "vllm_server_base_url": Foreign((TRL,), "sampler.urls", "", lambda value: f"[{value}]"),
    "max_off_policy_steps": Foreign(
        (PRIME,),
        "sampler.max_staleness",
        "it counts documents trained on since, not steps: multiply by schedule.docs_per_step",
        _UNKNOWN,
    ),
    "max_async_level": Foreign(
        (PRIME,),
        "sampler.max_staleness",
        "it counts documents trained on since, not steps: multiply by schedule.docs_per_step",
        _UNKNOWN,
    ),
    # The optimizer
    "lr": Foreign((VERL, PRIME, SLIME, DEEPSPEED), "optimizer.learning_rate"),
    "actor_learning_rate": Foreign((OPENRLHF,), "optimizer.learning_rate"),
    "lr_scheduler_type": Foreign((TRL, TRANSFORMERS), "optimizer.schedule", "", lambda value: _SCHEDULES[value]),
    "lr_warmup_steps": Foreign((VERL,), "optimizer.warmup_steps", "", lambda value: max(int(value), 0)),
    "warmup_ratio": Foreign((TRL, TRANSFORMERS), "optimizer.warmup_steps", "a number of steps", _UNKNOWN),
    "max_grad_norm": Foreign((TRL, TRANSFORMERS), "optimizer.gradient_clip", "", _null_if_zero),
    "max_norm": Foreign((PRIME, OPENRLHF), "optimizer.gradient_clip", "", _null_if_zero),
    "grad_clip": Foreign((VERL,), "optimizer.gradient_clip", "", _null_if_zero),
    "clip_grad": Foreign((VERL, SLIME), "optimizer.gradient_clip", "", _null_if_zero),
    "gradient_clipping": Foreign((DEEPSPEED,), "optimizer.gradient_clip", "", _null_if_zero),
    "adam_beta1": Foreign((TRL, TRANSFORMERS, SLIME), "optimizer.beta1"),
    "adam_beta2": Foreign((TRL, TRANSFORMERS, SLIME), "optimizer.beta2"),
    "adam_epsilon": Foreign((TRL, TRANSFORMERS), "optimizer.epsilon"),
    # The model, memory and ranks
    "model_name_or_path": Foreign((TRL, TRANSFORMERS), "model.path", "a directory with the model's files"),
    "hf_checkpoint": Foreign((SLIME,), "model.path"),
    "pretrain": Foreign((OPENRLHF,), "model.path", "a directory with the model's files"),
    "bf16": Foreign((TRL, TRANSFORMERS, OPENRLHF), "model.dtype", "", _dtype),
    "torch_dtype": Foreign((TRL, TRANSFORMERS), "model.dtype", "", _dtype),
    "gradient_checkpointing": Foreign((TRL, TRANSFORMERS, OPENRLHF), "model.activation_checkpointing"),
    "enable_gradient_checkpointing": Foreign((VERL,), "model.activation_checkpointing"),
    "use_peft": Foreign((TRL,), "adapter.type", "lora", _UNKNOWN),
    "lora_r": Foreign((TRL,), "adapter.rank"),
    "lora_rank": Foreign((VERL, OPENRLHF), "adapter.rank", "0 there is no section adapter here"),
    "lora_alpha": Foreign((TRL, VERL, OPENRLHF), "adapter.alpha"),
    "lora_target_modules": Foreign((TRL,), "adapter.targets"),
    "target_modules": Foreign((VERL, OPENRLHF), "adapter.targets"),
    "lora_dropout": Foreign((TRL, OPENRLHF), None, "a score is a function of the weights: nothing is dropped"),
    "torch_compile": Foreign((TRL, TRANSFORMERS), "model.compile"),
    "attn_implementation": Foreign(
        (TRL, TRANSFORMERS, OPENRLHF), "model.attention", "auto: FlashAttention 4 where it can be used", _attention
    ),
    "use_liger_kernel": Foreign(
        (TRL, TRANSFORMERS, OPENRLHF), None, "logits are never held whole: model.head.logits_chunk_size"
    ),
    "use_liger_loss": Foreign((TRL,), None, "logits are never held whole: model.head.logits_chunk_size"),
    "use_remove_padding": Foreign((VERL,), None, "documents are always packed, and nothing is padded"),
    "ulysses_sequence_parallel_size": Foreign((VERL,), "parallel.context"),
    "context_parallel_size": Foreign((SLIME,), "parallel.context"),
    "ring_attn_size": Foreign((OPENRLHF,), "parallel.context"),
    "ds_tensor_parallel_size": Foreign((OPENRLHF,), "parallel.tensor"),
    "tensor_model_parallel_size": Foreign((SLIME,), "parallel.tensor", "of the trainer; a server has its own"),
    "pipeline_model_parallel_size": Foreign((SLIME,), "parallel.pipeline"),
    "fsdp_size": Foreign((VERL,), "parallel.data_shard"),
    "zero_stage": Foreign(
        (OPENRLHF,),
        "parallel.data_shard",
        "weights, gradients and optimizer are sharded together, as in stage 3",
        lambda value: -1 if value else 1,
    ),
    "param_offload": Foreign((VERL,), None, _MEMORY),
    "optimizer_offload": Foreign((VERL,), "optimizer.offload", "", _states),
    "adam_offload": Foreign((OPENRLHF,), "optimizer.offload", "", _states),
    # Runs
    "output_dir": Foreign((TRL, TRANSFORMERS, PRIME), "checkpoint.directory"),
    "default_local_dir": Foreign((VERL,), "checkpoint.directory"),
    "save_path": Foreign((OPENRLHF,), "checkpoint.directory"),
    "save_steps": Foreign((TRL, TRANSFORMERS, OPENRLHF), "checkpoint.every", "", lambda value: max(int(value), 0)),
    "save_freq": Foreign((VERL,), "checkpoint.every", "", lambda value: max(int(value), 0)),
    "save_interval": Foreign((SLIME,), "checkpoint.every"),
    "save_total_limit": Foreign((TRL, TRANSFORMERS), "checkpoint.keep"),
    "eval_steps": Foreign((TRL, TRANSFORMERS, OPENRLHF), "evaluation.every"),
    "test_freq": Foreign((VERL,), "evaluation.every"),
    "eval_interval": Foreign((SLIME,), "evaluation.every"),
    "report_to": Foreign(
        (TRL, TRANSFORMERS), "logging.wandb or logging.tensorboard or logging.mlflow or logging.trackio", "", _UNKNOWN
    ),
    "run_name": Foreign((TRL, TRANSFORMERS), "logging.wandb.name"),
    "wandb_project": Foreign((OPENRLHF, SLIME), "logging.wandb.project"),
    "project_name": Foreign((VERL,), "logging.wandb.project"),
    "experiment_name": Foreign((VERL,), "logging.wandb.name"),
    "full_determinism": Foreign((TRANSFORMERS, OPENRLHF), "deterministic"),
}


def explain(name: Sequence[str], value: Any = None) -> str | None:
    """Say what a name of another trainer is here; None where no other trainer has it."""
    found = FOREIGN.get(name[-1].replace("-", "_")) if name else None
    return None if found is None else found.explain(name[-1], value)


def markdown_table() -> str:
    """Write the names of each trainer beside ours, as a page of the documentation."""
    lines = [
        "# Coming from another trainer",
        "",
        "<!-- Written by `python -m truestep.config.foreign > docs/coming-from.md`; a test compares the two. -->",
        "",
        "An option under another trainer's name is an error that says what to write instead. These are the",
        "names that truestep knows. A value that has another meaning here is converted in the message.",
        "",
        "The names of TRL, verl, prime-rl, OpenRLHF, slime, Fast-LLM and PipelineRL were read in their sources:",
        "",
        *(f"- {trainer}: {read}" for trainer, read in READ.items()),
        "",
        "Those of transformers and DeepSpeed are of their documentation. Another version may have other names.",
    ]
    for trainer in sorted({owner for found in FOREIGN.values() for owner in found.owners}, key=str.lower):
        lines += ["", f"## {trainer}", "", "| there | here | note |", "| --- | --- | --- |"]
        for name, found in FOREIGN.items():
            if trainer in found.owners:
                lines.append(f"| `{name}` | {_code(found.option)} | {found.note} |")
    return "\n".join(lines)


def _code(option: str | None) -> str:
    if option is None:
        return "none"
    joint = next((word for word in (" and ", " or ") if word in option), None)
    return joint.join(f"`{part}`" for part in option.split(joint)) if joint else f"`{option}`"


if __name__ == "__main__":
    print(markdown_table())
