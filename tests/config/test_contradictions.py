"""Options that are valid alone and not together: each rule refuses, says which options, and where they are."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from truestep.config import losses, schema, sections
from truestep.config.load import ConfigError, load_config

MODEL = "model: {path: m}\n"
SAMPLER = "sampler: {prompts: p, reward: r}\n"
SAMPLED = {
    "data": "data: {group_size: 4}\n",
    "schedule": "schedule: {docs_per_step: 8, steps: 3}\n",
}


def sampled(**changes: str) -> str:
    """A good run with a sampler, some of its sections replaced. Line 2 is data, 3 schedule, 4 the sampler."""
    return MODEL + "".join((SAMPLED | changes).values()) + SAMPLER


def sent(data: str) -> str:
    """Documents of a watched directory; everything is in line 2."""
    return MODEL + f"data: {{source: {{type: files, directory: d}}, {data}}}\n"


def served(options: str) -> str:
    """A run whose servers sample; the sampler is in line 4."""
    sampler = f"sampler: {{type: server, urls: [u], model: m, prompts: p, reward: r, {options}}}\n"
    return MODEL + "".join(SAMPLED.values()) + sampler


CASES = [
    (MODEL + "preset: [tis, dappo]\n", "2: preset: 'dappo' is unknown: did you mean dapo?"),
    (
        "model: {path: m, freeze: [lm_head.*]}\nadapter: {}\n",
        "1, run.yaml:2: model.freeze does nothing with adapter, which freezes every weight of the model: leave layers "
        "without an adapter by adapter.targets",
    ),
    (
        "model: {path: m, experts: {router: frozen, balance: loss}}\n",
        "1: model.experts.balance changes routers, and model.experts.router: frozen keeps them: remove one of them",
    ),
    (
        "model: {path: m, experts: {strength: 0.1}}\n",
        "1: model.experts.strength needs model.experts.balance: loss or bias",
    ),
    (
        "model: {path: m, experts: {balance: bias}}\nadapter: {}\n",
        "1, run.yaml:2: model.experts.balance: bias changes the model, and with an adapter only the adapter is trained "
        "and saved",
    ),
    (
        sampled().replace("prompts: p,", "prompts: p, prompt_weights: {math: 1},"),
        "4: sampler.prompt_weights are for several sources: give sampler.prompts as {math: FILE, code: FILE}",
    ),
    (
        sampled().replace("prompts: p,", "prompts: {math: p, code: q}, prompt_weights: {math: 1},"),
        "4: sampler.prompt_weights names math, and sampler.prompts code, math: give each source a weight",
    ),
    (
        sampled().replace("prompts: p,", "prompts: p, curriculum: {easy: 0.5, hopeless: 0.5},"),
        "4: sampler.curriculum.hopeless: 0.5 is not below sampler.curriculum.easy: 0.5: prompts between the two are "
        "drawn",
    ),
    (
        MODEL + "checkpoint: {in_memory_gigabytes: 2}\n",
        "2: checkpoint.in_memory_gigabytes does nothing without checkpoint.in_memory_every: set it too",
    ),
    (
        MODEL + "checkpoint: {every: 5, in_memory_every: 5}\n",
        "2: checkpoint.in_memory_every: 5 does nothing beside checkpoint.every: 5, which saves as often: set it lower",
    ),
    (
        MODEL + "adapter: {}\ncheckpoint: {in_memory_every: 2}\n",
        "3, run.yaml:2: checkpoint.in_memory_every is for whole models, and with adapter a checkpoint is small: set "
        "checkpoint.every lower instead",
    ),
    (
        MODEL + "adapter: {}\ncheckpoint: {hugging_face_every: 2}\n",
        "3, run.yaml:2: checkpoint.hugging_face_every is for whole models, and with adapter a checkpoint holds the "
        "adapter alone: leave it out, and use truestep export, which merges the adapter",
    ),
    (
        served("adapter: served"),
        "4: sampler.adapter: served needs a LoRA adapter, and there is no section adapter",
    ),
    (
        served("adapter: served, pause: keep") + "adapter: {}\n",
        "4, run.yaml:5: sampler.pause: keep lets completions go on with new weights, and with sampler.adapter: served "
        "they end with the adapter that they began with: set sampler.pause: wait or abort",
    ),
    (
        served("transfer: nccl, protocol: sglang"),
        "4: sampler.transfer: nccl needs sampler.protocol: vllm; sglang takes weights from a disk",
    ),
    (
        served("transfer: nccl").replace("model: {path: m}", "model: {path: m, device: cpu}"),
        "4, run.yaml:1: sampler.transfer: nccl sends weights from a GPU, and model.device is cpu",
    ),
    (
        served("adapter: served, transfer: nccl") + "adapter: {}\n",
        "4, run.yaml:5: sampler.transfer: nccl is for whole models, and sampler.adapter: served gives servers an "
        "adapter alone",
    ),
    (
        served("adapter: served, protocol: sglang") + "adapter: {}\n",
        "4: sampler.adapter: served needs sampler.protocol: vllm; with sglang set sampler.adapter: merged",
    ),
    (
        MODEL + "adapter: {path: a, rank: 8}\n",
        "2: adapter.rank and adapter.path are both given: the adapter of adapter.path has its own rank",
    ),
    (
        "model: {path: m, activation_offload: true}\n",
        "1: model.activation_offload is for the inputs of recomputed layers: set model.activation_checkpointing too, "
        "full or selective",
    ),
    (
        "model: {path: m, activation_offload: true, activation_checkpointing: elementwise, compile: true}\n",
        "1: model.activation_offload is for the inputs of recomputed layers, and model.activation_checkpointing: "
        "elementwise recomputes no compiled layer: set it to full or selective",
    ),
    (
        MODEL + "optimizer: {type: adamw, offload_room: 8}\n",
        "2: optimizer.offload_room has no effect without offload: set optimizer.offload too, states or all",
    ),
    (
        "model: {path: m, attention: flash, dtype: float32}\n",
        "1: model.attention: flash computes in bfloat16 on a GPU: it cannot be used with model.dtype: float32",
    ),
    (
        MODEL + "parallel: {stages_per_rank: 2}\n",
        "2: parallel.stages_per_rank is for pipelines: it needs parallel.pipeline > 1",
    ),
    (
        sampled(data="data: {group_size: 4, path: a}\n"),
        "2, run.yaml:4: data.path and sampler are both given: documents come from one source; remove one of the two",
    ),
    (
        sampled() + "loss: {type: cross_entropy}\n",
        "5, run.yaml:4: loss.type: cross_entropy is supervised: give data.path instead of a sampler",
    ),
    (
        sampled().replace("reward: r", "reward: r, environment: {class: a:B}"),
        "4: sampler needs sampler.reward or sampler.environment: one of the two",
    ),
    (
        sampled().replace("reward: r", "reward: r, reward_isolation: same_process, reward_memory: 2"),
        "4: sampler.reward_memory is for processes of rewards: there are none with reward_isolation: same_process",
    ),
    (
        sampled().replace("reward: r", "environment: {type: command, run: x}, reward_isolation: same_process"),
        "4: sampler.reward_isolation: same_process is for a reward or an environment of your own: not with "
        "sampler.environment.type: command",
    ),
    (
        sampled().replace("reward: r", "reward: r, max_turns: 3"),
        "4: sampler.max_turns is for sampler.environment: a reward's episodes have one turn",
    ),
    (
        sampled().replace("prompts: p, ", ""),
        "4: sampler needs sampler.prompts: with a reward, only a file or a dataset has prompts",
    ),
    (
        sampled().replace("reward: r", "environment: {options: {size: 3}}"),
        "4: sampler.environment needs class with type: python",
    ),
    (
        sampled().replace("reward: r", "environment: {type: openenv, class: a:B}"),
        "4: sampler.environment.class is for type: python",
    ),
    (
        sampled().replace("prompts: p, reward: r", "environment: {type: reasoning_gym}")
        + "evaluation: {prompts: q, every: 2}\n",
        "5, run.yaml:4: evaluation.prompts is not for sampler.environment.type: reasoning_gym, which makes its own "
        "prompts",
    ),
    (
        sampled().replace("reward: r", "environment: {type: command, run: x, options: {size: 3}}"),
        "4: sampler.environment.options are not for type: command: give a program its arguments in run",
    ),
    (
        sampled().replace("reward: r", "environment: {type: command, run: x}, reward_network: false"),
        "4: sampler.reward_network: false would keep the program from asking for completions",
    ),
    (
        sampled().replace("prompts: p, reward: r", "environment: {type: command, run: x}"),
        "4: sampler.environment.type: command needs sampler.prompts: a program makes none",
    ),
    (
        sampled(data="data: {group_size: 4, tokens_per_microbatch: 64}\n").replace(
            "reward: r", "environment: {class: a:B}"
        ),
        "2: sampler.max_episode_tokens: 16384 is more than data.tokens_per_microbatch: 64, so an episode might not fit",
    ),
    (sampled(data=""), "3: sampler needs data.group_size: how many completions each prompt gets"),
    (
        sampled(schedule="schedule: {steps: 3}\n"),
        "4: sampler needs schedule.docs_per_step: how many completions make a step",
    ),
    (
        sampled(schedule="schedule:\n  steps: 3\n  docs_per_step: 6\n"),
        "5, run.yaml:2: schedule.docs_per_step: 6 is not a multiple of data.group_size: 4, so a group would be cut in "
        "two: set it to 8, for example",
    ),
    (
        sampled(data="data: {group_size: 4, advantages: none}\n"),
        "2, run.yaml:4: data.advantages: none expects records that carry their advantage; a sampler gives rewards",
    ),
    (
        sampled(data="data: {group_size: 4, shuffle: true}\n"),
        "2, run.yaml:4: data.shuffle is for files; a sampler's prompts are always taken in a seeded order",
    ),
    (
        sampled(data="data: {group_size: 4, epochs: 2}\n"),
        "2, run.yaml:4, run.yaml:3: data.epochs is for files; with a sampler, schedule.steps says how long the run is",
    ),
    (
        sampled(schedule="schedule: {steps: 3, docs_per_step: 8, overshoot: keep}\n"),
        "3, run.yaml:4: schedule.overshoot: keep is for files; a sampler makes exactly schedule.docs_per_step "
        "documents",
    ),
    (
        sampled(schedule="schedule: {steps: 3, docs_per_step: 8, last_step: drop}\n"),
        "3, run.yaml:4: schedule.last_step: drop is for files; a sampler's documents never end",
    ),
    (
        sampled(data="data: {group_size: 4, fields: {mine: {level: label}}}\n"),
        "2, run.yaml:4: data.fields is for the records of data.path and data.source; a sampler's documents have no "
        "others",
    ),
    (
        sampled(data="data: {group_size: 4, temperature: 0.7}\n"),
        "2, run.yaml:4: data.temperature is for files; with a sampler, set sampler.temperature",
    ),
    (
        sampled(schedule="schedule: {docs_per_step: 8}\n"),
        "4: sampler needs schedule.steps: its prompts are repeated without end",
    ),
    (
        sent("group_size: 4, path: a"),
        "2: data.source and data.path are both given: documents come from one source; remove one of the two",
    ),
    (
        sent("group_size: 4") + SAMPLER,
        "2, run.yaml:3: data.source and sampler are both given: documents come from one source; remove one of the two",
    ),
    (
        sent("group_size: 4, shuffle: true"),
        "2: data.shuffle is for the files of data.path; those of data.source are used as they arrive",
    ),
    (
        sent("group_size: 4, epochs: 2"),
        "2: data.epochs is for the files of data.path; the documents of data.source come once",
    ),
    (
        sampled(data="data: {group_size: 4, group_timeout: 5}\n"),
        "2: data.group_timeout needs data.source: groups from other sources are complete at the end of the data",
    ),
    (
        sent("advantages: leave_one_out"),
        "2: data.advantages: leave_one_out needs data.group_size with data.source: how many rollouts make a group "
        "complete (or data.advantages: none, where records carry their own)",
    ),
    (
        MODEL
        + "".join(SAMPLED.values())
        + "sampler: {type: server, prompts: p, reward: r, model: m, urls: [http://a, http://b, http://a/]}\n",
        "4: sampler.urls names a server twice",
    ),
    *(
        (MODEL + "".join(SAMPLED.values()) + f"sampler: {{type: server, prompts: p, reward: r{given}}}\n", f"4: {said}")
        for given, said in (
            (
                "",
                "sampler needs sampler.urls (running servers) or sampler.start (servers that the run starts): one of "
                "them",
            ),
            (
                ", protocol: a.b:C, start: {environment: e}",
                "sampler.start starts vllm or sglang; start servers of sampler.protocol: a.b:C yourself",
            ),
            (
                ", api_key_env: KEY, start: {environment: e}",
                "sampler.api_key_env is for sampler.urls; the run makes a key for servers that it starts",
            ),
            (", start: {environment: e, gpus: [1, 2, 1]}", "sampler.start.gpus names a GPU twice"),
            (
                ", start: {environment: e, gpus: [1, 2, 3], tensor: 2}",
                "sampler.start.gpus: 3 cannot be divided among servers of sampler.start.tensor: 2",
            ),
        )
    ),
    (
        MODEL + "".join(SAMPLED.values()) + "sampler: {prompts: p, reward: r, exact: true, engine: false}\n",
        "4: sampler.exact: true is computed by the engine: leave out sampler.engine: false",
    ),
    (MODEL + "schedule:\n  overshoot: keep", "3: schedule.overshoot: keep needs schedule.docs_per_step > 0"),
    (
        MODEL + "schedule:\n  docs_per_step: 8\n  depth_first_micro_batches: 2\n",
        "4, run.yaml:3: schedule.depth_first_micro_batches fixes the number of micro-batches in a step, and "
        "schedule.docs_per_step that of documents: set one of the two",
    ),
    (
        MODEL + "optimizer:\n  schedule: cosine",
        "3: optimizer.schedule: cosine needs schedule.steps: where the learning rate ends",
    ),
    (
        MODEL + "optimizer: {warmup_steps: 9}\nschedule: {steps: 5}\n",
        "2, run.yaml:3: optimizer.warmup_steps: 9 is more than schedule.steps: 5",
    ),
    (
        MODEL + "optimizer: {schedule: linear, minimum_learning_rate: 1}\nschedule: {steps: 5}\n",
        "2: optimizer.minimum_learning_rate is above optimizer.learning_rate",
    ),
    (
        MODEL + "optimizer: {minimum_learning_rate: 1e-9}\n",
        "2: optimizer.minimum_learning_rate does nothing with optimizer.schedule: constant",
    ),
    (
        MODEL + "evaluation: {prompts: p}\n",
        "2: evaluation needs evaluation.reward: there is no sampler.reward to take",
    ),
    (
        MODEL + "evaluation: {every: 3}\n",
        "2: evaluation needs evaluation.prompts or evaluation.sets, to sample answers, or evaluation.path, held-out "
        "documents of a supervised run: one of them",
    ),
    (
        sampled() + "evaluation: {prompts: p, sets: {a: {prompts: q}}}\n",
        "5: evaluation.prompts and evaluation.sets are both given: make it one of the sets, or remove the sets",
    ),
    (
        sampled() + "evaluation: {sets: {a: {prompts: q, reward: r, environment: {class: e}}}}\n",
        "5: evaluation.sets.a.reward and evaluation.sets.a.environment are both given: one of the two rates answers",
    ),
    (
        sampled() + "evaluation: {sets: {a: {reward: r}}}\n",
        "5: evaluation.sets.a needs evaluation.sets.a.prompts: it has no environment that makes them",
    ),
    (
        sampled() + "checkpoint: {keep_best: evaluation/loss}\n",
        "5: checkpoint.keep_best: evaluation/loss is a metric of evaluations: it needs evaluation",
    ),
    (
        sampled() + "evaluation: {sets: {math: {prompts: q}}}\ncheckpoint: {keep_best: evaluation/math/reward}\n",
        "6, run.yaml:5: checkpoint.keep_best: evaluation/math/reward is no metric of this run's evaluations: did you "
        "mean evaluation/math/greedy_reward?",
    ),
    (
        MODEL + "evaluation: {path: p}\n",
        "2: evaluation.path is for supervised losses, and loss.type: grpo is not one",
    ),
    (
        MODEL + "evaluation: {path: p, reward: r}\nloss: {type: cross_entropy}\n",
        "2: evaluation.reward is for answers that are sampled: it does nothing with evaluation.path",
    ),
    (
        MODEL + "evaluation: {path: p, pass_reward: 1}\nloss: {type: cross_entropy}\n",
        "2: evaluation.pass_reward is for answers that are sampled: it needs evaluation.prompts",
    ),
    (
        MODEL + "data: {tokens_per_microbatch: 100, pad_to_multiple: 64}\n",
        "2: data.tokens_per_microbatch: 100 is not a multiple of data.pad_to_multiple: 64, so padding could exceed the "
        "budget",
    ),
    (
        sampled() + "parallel: {pipeline: 2}\n",
        "5, run.yaml:4: parallel.pipeline: 2 leaves no rank with all layers, which sampling needs: set "
        "sampler.type: server, remove sampler (and train on data.path or data.source), or set "
        "parallel.pipeline: 1 (sampling works with parallel.tensor)",
    ),
    (
        MODEL + "evaluation: {prompts: p, reward: r}\nparallel: {pipeline: 4}\n",
        "3, run.yaml:2: parallel.pipeline: 4 leaves no rank with all layers, which evaluation needs: remove "
        "evaluation, set evaluation.servers: true with servers that sample, or set "
        "parallel.pipeline: 1 (generating works with parallel.tensor)",
    ),
    (
        sampled() + "parallel: {expert: 2}\n",
        "5, run.yaml:4: parallel.expert: 2 leaves no rank with all experts, which sampling needs: set sampler.type: "
        "server, remove sampler (and train on data.path or data.source), or set parallel.expert: 1",
    ),
    (
        MODEL + "evaluation: {prompts: p, reward: r}\nparallel: {expert: 4}\n",
        "3, run.yaml:2: parallel.expert: 4 leaves no rank with all experts, which evaluation needs: remove evaluation, "
        "set evaluation.servers: true with servers that sample, or set parallel.expert: 1",
    ),
    (
        MODEL + "optimizer: {type: muon}\nparallel: {expert: 4}\n",
        "2, run.yaml:3: optimizer.type: muon does not support parallel.expert: 4: set another "
        "optimizer.type, or parallel.expert: 1",
    ),
    (
        sampled().replace("reward: r", "reward: r, exact: true") + "parallel: {tensor: 2}\n",
        "4, run.yaml:5: sampler.exact: true needs products on one rank, and parallel.tensor: 2 sums them over "
        "ranks: leave out sampler.exact, or set parallel.tensor: 1",
    ),
    (
        sampled() + "evaluation: {prompts: p, servers: true}\n",
        "5: evaluation.servers needs sampler.type: server: there are no servers to ask",
    ),
    (
        MODEL
        + "".join(SAMPLED.values())
        + "sampler: {type: server, prompts: p, reward: r, model: m, urls: [http://a]}\n"
        + "evaluation: {prompts: p, servers: true, top_k: 5}\n",
        "5: evaluation.top_k is not for evaluation.servers: servers draw from the whole distribution",
    ),
    (
        MODEL + "data: {advantages: group_normalized, advantage_scale: step}\n",
        "2: data.advantages: group_normalized has the scale group, and data.advantage_scale is step: write "
        "data.advantages: group_mean, or leave out the scale",
    ),
    (
        MODEL + "data: {advantages: group_mean, advantage_scale: step}\nloss: {type: cross_entropy}\n",
        "2, run.yaml:3: data.advantage_scale is for advantages, which loss.type: cross_entropy does not use",
    ),
    (
        MODEL + "data: {advantages: none, overlong_penalty: {from: 1, to: 2}}\n",
        "2: data.overlong_penalty is for advantages from rewards; with data.advantages: none, records have their own",
    ),
    (
        MODEL + "data: {advantages: leave_one_out, advantage_std_floor: 0.1}\n",
        "2: data.advantage_std_floor does nothing without data.advantage_scale: group or step",
    ),
    (
        MODEL + "data: {overlong_penalty: {from: 20, to: 20}}\n",
        "2: data.overlong_penalty.from is not below data.overlong_penalty.to: the penalty grows between them",
    ),
    (
        MODEL + "data: {zero_advantage: skip}\nloss: {type: cross_entropy}\nschedule: {docs_per_step: 8}\n",
        "2, run.yaml:3: data.zero_advantage is for advantages, which loss.type: cross_entropy does not use",
    ),
    (
        MODEL + "data: {zero_advantage: skip}\nloss: {z_loss: 0.1}\nschedule: {docs_per_step: 8}\n",
        "2, run.yaml:3: data.zero_advantage: skip leaves out backward passes without a gradient, but loss.z_loss may "
        "have one even if the advantage is 0",
    ),
    (
        MODEL + "data: {zero_advantage: skip}\n",
        "2: data.zero_advantage: skip needs schedule.docs_per_step > 0 and schedule.overshoot: carry, where documents "
        "are packed once the step's are known",
    ),
    (
        MODEL + "data: {zero_advantage: replace}\n",
        "2: data.zero_advantage: replace needs a sampler, which can make other documents",
    ),
    (
        sampled(data="data: {group_size: 1, zero_advantage: replace}\n"),
        "2: data.zero_advantage: replace would replace every group of data.group_size: 1, whose advantage is 0",
    ),
    (
        sampled(data="data: {group_size: 1}\n"),
        "2: data.group_size: 1 leaves nothing to compare a completion with, so data.advantages: group_normalized gives "
        "0 to every one and nothing is learned: sample several, such as data.group_size: 8",
    ),
    (MODEL + "data: {replace_limit: 7}\n", "2: data.replace_limit is for data.zero_advantage: replace"),
    (
        sampled(data="data: {group_size: 4, truncated: drop}\n"),
        "2, run.yaml:4, run.yaml:3: data.truncated: drop would make a sampler's steps smaller than "
        "schedule.docs_per_step, without their long completions: set data.truncated: mask",
    ),
    (
        "model: {path: m, compile: true}\nparallel: {tensor: 2}\n",
        "1, run.yaml:2: model.compile: layers that are cut over parallel.tensor: 2 ranks are not compiled; remove "
        "one of the two",
    ),
    (
        sampled() + "loss: {kl_reference: {weight: 1.0, path: records}}\n",
        "5, run.yaml:4: loss.kl_reference.path: records needs records with reference_logprobs, which a sampler does "
        "not write",
    ),
    (
        MODEL + "loss: {kl_reference: {weight: 1.0, path: records, offload: true}}\n",
        "2: loss.kl_reference.offload is for a reference model, and with path: records there is none",
    ),
    (
        MODEL + "adapter: {rank: 2}\nloss: {kl_reference: {weight: 1.0, offload: true}}\n",
        "3, run.yaml:2: loss.kl_reference.offload: the reference of an adapter is the model that it is trained on, "
        "which has to stay: leave out offload, or name another model with loss.kl_reference.path",
    ),
]

SECTION_CASES = [
    (
        MODEL + "loss:\n  normalize_by: constant\n",
        "3: loss: normalize_by: constant and max_labels go together: set both or neither",
    ),
    (
        MODEL + "loss: {type: gspo, max_labels: 3}\n",
        "2: loss: normalize_by: constant and max_labels go together: set both or neither",
    ),
    (
        MODEL + "loss:\n  correction: {type: mask, low: 3, high: 2}\n",
        "3: loss.correction: low: 3 is above high: 2, so no c lies between them",
    ),
    (
        MODEL + "loss:\n  kl_reference: {weight: 1.0, in: reward, estimator: k3}\n",
        "3: loss.kl_reference: estimator: k3 is for in: loss; in: reward always takes k1",
    ),
    (
        MODEL + "loss:\n  entropy_normalize_by: labels\n",
        "3: loss: entropy_normalize_by has no effect without an entropy bonus: set entropy_bonus or "
        "entropy_target, or leave it out",
    ),
    (
        MODEL + "loss:\n  clip_cov: {low: 5, high: 1}\n",
        "3: loss.clip_cov: low: 5 is not below high: 1, so no label could be chosen",
    ),
    (
        MODEL + "loss:\n  clip_cov: {}\n  kl_cov: {}\n",
        "3, run.yaml:4: loss: clip_cov and kl_cov both choose labels by their covariance: remove one of the two",
    ),
    (
        MODEL + "loss: {entropy_bonus: 0.2, entropy_target: {entropy: 0.5}}\n",
        "2: loss: entropy_bonus: 0.2 is above entropy_target.largest_weight: 0.1; the weight has to "
        "start at or below it",
    ),
]


def message(text: str, directory: Path, *overrides: str) -> str:
    (directory / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(Path("run.yaml"), overrides)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


SOURCE_CASES = [
    ("{stream: s}", "2: data.source.type must be stream, files or custom, not null"),
    ("{type: stream}", "2: data.source.stream is required"),
    (
        "{type: strem, stream: s}",
        "2: data.source.type must be stream, files or custom, not 'strem'; did you mean stream?",
    ),
    (
        "{type: files, directory: d, group: g}",
        "2: data.source.group is not an option of data.source.type: files (set at run.yaml:2); stream has it",
    ),
    ("d", "2: data.source must be a section of options or null, not 'd'"),
]


@pytest.mark.parametrize(("source", "expected"), SOURCE_CASES)
def test_a_source_that_is_not_well_given(source: str, expected: str, tmp_path: Path) -> None:
    assert message(MODEL + f"data: {{source: {source}, advantages: none}}\n", tmp_path) == f"run.yaml:{expected}"


@pytest.mark.parametrize(("text", "expected"), CASES + SECTION_CASES)
def test_each_contradiction(text: str, expected: str, tmp_path: Path) -> None:
    assert message(text, tmp_path) == f"run.yaml:{expected}"


def test_what_the_cases_start_from_is_good(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(sampled() + "evaluation: {prompts: p}\n")
    assert load_config(tmp_path / "run.yaml").sampler is not None
    (tmp_path / "run.yaml").write_text(sent("group_size: 4"))
    assert load_config(tmp_path / "run.yaml").data.source is not None
    (tmp_path / "run.yaml").write_text(sent("advantages: none"))
    assert load_config(tmp_path / "run.yaml").data.group_size is None
    (tmp_path / "run.yaml").write_text(sent("epochs: 1") + "loss: {type: cross_entropy}\n")
    assert load_config(tmp_path / "run.yaml").data.group_size is None
    (tmp_path / "run.yaml").write_text(MODEL + "evaluation: {prompts: p, reward: r}\n")
    assert load_config(tmp_path / "run.yaml").evaluation is not None
    own = sampled().replace("prompts: p, reward: r", "environment: {type: reasoning_gym}")
    (tmp_path / "run.yaml").write_text(own + "evaluation: {every: 2, pass_reward: 1}\n")
    assert load_config(tmp_path / "run.yaml").evaluation is not None


def test_contradictions_within_a_set_name_its_own_options(tmp_path: Path) -> None:
    """The rules of sampler.environment and of evaluation hold for each set."""
    of_sets = {
        "{environment: {type: command}}": "evaluation.sets.a.environment needs run with type: command",
        "{environment: {type: reasoning_gym}, prompts: q}": "evaluation.sets.a.prompts is not for "
        "evaluation.sets.a.environment.type: reasoning_gym, which makes its own prompts",
        "{environment: {type: command, run: x}}": "evaluation.sets.a.environment.type: command needs "
        "evaluation.sets.a.prompts: a program makes none",
    }
    for given, expected in of_sets.items():
        assert message(sampled() + f"evaluation: {{sets: {{a: {given}}}}}\n", tmp_path) == f"run.yaml:5: {expected}"
    text = MODEL + "evaluation: {sets: {a: {prompts: q}}}\n"
    assert "2: evaluation needs evaluation.sets.a.reward: there is no sampler.reward" in message(text, tmp_path)
    text = sampled() + "evaluation: {sets: {a: {prompts: q, rewards: r}}}\n"
    assert message(text, tmp_path) == "run.yaml:5: evaluation.sets.a.rewards: extra inputs are not permitted"


def test_a_contradiction_with_the_command_line_names_it(tmp_path: Path) -> None:
    text = message(MODEL + "data: {path: a}\n", tmp_path, "--sampler", "{prompts: p, reward: r}")
    assert text.startswith("run.yaml:2, command line: data.path and sampler are both given")


def test_every_rule_has_a_case() -> None:
    tree = ast.parse(inspect.getsource(schema))
    rules = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("_")]
    refusals = [node for rule in rules for node in ast.walk(rule) if isinstance(node, ast.Yield)]
    assert len(refusals) == len(CASES)
    assert len(rules) == len(schema._RULES)


def test_every_rule_of_a_section_has_a_case() -> None:
    sources = [inspect.getsource(module) for module in (sections, losses)]
    raised = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    # Four others are of custom losses (tests/doors/test_loss.py), and two of datasets (environments/test_prompts.py).
    assert len(raised) == len({text for _, text in SECTION_CASES if "max_labels" not in text}) + 1 + 4 + 2
