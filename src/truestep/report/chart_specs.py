"""The specifications of a report's charts: their metrics and how they are drawn."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from truestep.report.runs import Run
from truestep.text import printable


@dataclass(frozen=True)
class ChartSpec:
    """A chart without data: its metrics by key, with the names of their lines, and options for drawing it."""

    title: str
    metrics: Mapping[str, str]
    unit: str = ""
    from_evaluation: bool = False
    # In a comparison of runs, True: one chart for each metric; False: one chart, for the first metric only.
    compare_each: bool = False
    from_zero: bool = False
    logarithmic_if_wide: bool = False
    reference: float | None = None
    # The smallest range of the vertical axis. It keeps rounding errors from looking large.
    least_range: float = 0.0
    # Whether a line is smoothed. False for a metric without noise, such as the learning rate.
    smoothed: bool = True
    # True if the metrics are parts of a whole. They are drawn as stacked areas.
    stacked: bool = False
    # True for a chart of full width on a page of one run.
    wide: bool = False


def _share(title: str, **names: str) -> ChartSpec:
    return ChartSpec(title, names, unit="share", from_zero=True, least_range=1e-3)


GROUPS: dict[str, tuple[ChartSpec, ...]] = {
    "Reward": (
        ChartSpec(
            "Held-out reward",
            {"greedy_reward": "greedy", "sampled_reward": "sampled"},
            unit="mean",
            from_evaluation=True,
            compare_each=True,
            from_zero=True,
            wide=True,
        ),
        ChartSpec("Training reward", {"reward": "mean"}, unit="mean of the step", from_zero=True),
        ChartSpec(
            "Spread of rewards",
            {"group_reward_spread": "within a group", "reward_std": "of the step"},
            unit="standard deviation",
            from_zero=True,
        ),
        ChartSpec(
            "Groups",
            {
                "zero_advantage_groups": "nothing to learn",
                "distinct_completions": "distinct completions",
                "most_common_completion": "the most common completion",
            },
            unit="share",
            from_zero=True,
        ),
        ChartSpec(
            "Advantage",
            {"advantage": "mean", "max_advantage": "largest", "min_advantage": "smallest"},
            unit="of the step",
            reference=0.0,
            least_range=1e-3,
        ),
    ),
    "Completions": (
        ChartSpec(
            "Length",
            {
                "response_length": "mean",
                "max_response_length": "longest",
                "response_length_rewarded": "reward above the mean",
                "response_length_unrewarded": "other rewards",
            },
            unit="tokens",
            from_zero=True,
        ),
        _share("Truncated", truncated_fraction="truncated"),
        ChartSpec("Entropy", {"entropy": "entropy"}, unit="nats", from_zero=True),
        ChartSpec("Log-probability", {"new_logprobs": "new policy", "old_logprobs": "old policy"}, unit="nats"),
    ),
    "Episodes": (),
    "Prompts": (),
    "New policy against old": (
        ChartSpec("Ratio new/old", {"ratio_new_old": "ratio"}, unit="mean", reference=1.0, least_range=1e-3),
        ChartSpec(
            "Log-ratio of labels",
            {
                "log_ratio_p99": "99%",
                "log_ratio_p95": "95%",
                "log_ratio_p50": "median",
                "log_ratio_p5": "5%",
                "log_ratio_p1": "1%",
            },
            unit="percentiles",
            reference=0.0,
            least_range=1e-5,
        ),
        _share(
            "Clipped fraction",
            **{f"clipped_ratio_fraction{side}": side[1:] or "all" for side in ("", "_low", "_high")},
        ),
        ChartSpec("KL new/old", {"kl_new_old": "KL"}, unit="nats", reference=0.0, least_range=1e-5),
        ChartSpec("Effective sample size", {"effective_sample_share": "share"}, unit="share", least_range=1e-3),
    ),
    "Loss and optimizer": (
        ChartSpec("Loss", {"loss": "loss"}, least_range=1e-6),
        ChartSpec("Gradient norm", {"grad_norm": "norm"}, logarithmic_if_wide=True, from_zero=True),
        ChartSpec("Learning rate", {"learning_rate": "rate"}, from_zero=True, smoothed=False),
    ),
    "Experts": (
        _share("Most loaded expert", largest_expert_share="of its layer's choices"),
        ChartSpec("Evenness of loads", {"expert_load_entropy": "entropy over even"}, unit="share", from_zero=True),
        ChartSpec("Experts without a token", {"dead_experts": "in all layers"}, unit="experts", from_zero=True),
        _share("Tokens with the sampler's experts", replayed_tokens="of all tokens"),
        _share("Sampler and policy route otherwise", route_disagreement="choices", route_disagreement_tokens="tokens"),
    ),
    "Time and speed": (
        ChartSpec(
            "Throughput",
            {"tokens_per_second": "of the step", "sampled_tokens_per_second": "sampled"},
            unit="tokens/s",
            compare_each=True,
            from_zero=True,
        ),
        ChartSpec("Time of a step", {"step_time": "step"}, unit="seconds", from_zero=True),
        ChartSpec("Staleness", {"staleness": "mean", "max_staleness": "largest"}, unit="documents", from_zero=True),
        _share("Model FLOPs utilization", mfu="of the GPUs' peak"),
        ChartSpec("GPU memory", {"gpu_memory": "at the peak"}, unit="GiB", from_zero=True),
    ),
}

# The parts of a step's time, from the bottom of the chart to its top. The last two are the times of work between steps.
_TIMES = (
    *("sampling", "rating", "waiting", "reference", "forward", "head", "backward", "reduce", "check", "optimizer"),
    *("sync", "other", "evaluation", "save"),
)
# Runs of older versions log these metrics instead. `data_wait_time` includes the other two.
_OLD_TIMES = {
    "data_wait_time": "waiting for data",
    "sampling_time": "sampling",
    "rating_time": "waiting for rewards",
}

# The reasons for which episodes ended, from the bottom of the chart to its top.
_ENDS = ("environment", "max_turns", "max_episode_tokens", "max_new_tokens", "episode_timeout")
_EPISODES = (
    ChartSpec(
        "Turns",
        {"policy_turns": "of the policy", "max_policy_turns": "of the policy, most", "turns": "all"},
        unit="per document",
        from_zero=True,
    ),
    ChartSpec("Reward of a turn", {"turn_reward": "mean"}, unit="mean of the turns that have one", from_zero=True),
    ChartSpec(
        "Time of a turn",
        {"turn_time/drawing": "drawing", "turn_time/environment": "environment"},
        unit="seconds",
        compare_each=True,
        from_zero=True,
    ),
    _share("Malformed tool calls", malformed_tool_calls="of all calls"),
)

# Metrics without a chart of their own: they are meant for other programs, or another chart shows them.
_NOT_DRAWN = re.compile(
    r"step|documents_seen|num_\w+|ratio_new_old_\w+|log_ratio_p\d+|policy_loss|entropy_bonus|z_loss|kl_cov"
    r"|expert_balance|router_z_loss|(?:largest_expert_share|expert_load_entropy|dead_experts|route_disagreement)/\d+"
    r"|zero_advantage_fraction|effective_sample_size|min_response_length|(?:max|min)_(?:reward|staleness|ratio_new_old)"
    r"|data_wait_time|sampling_time|rating_time|rewards/.*|time/.*"
    r"|(?:max_policy_|policy_)?turns|turn_reward|turn_time/.*|tool_time/.*|(?:malformed_)?tool_calls(?:/.*)?|ended_by/.*"
    r"|(?:easy|hopeless)_prompts(?:/.*)?|source_(?:reward|groups|passes)/.*"
)


def groups_for(runs: Sequence[Run]) -> dict[str, tuple[ChartSpec, ...]]:
    """Return the specs by group, with an additional spec for each metric that no chart shows, such as a user's own."""
    drawn = {key for specs in GROUPS.values() for spec in specs for key in spec.metrics}
    logged = dict.fromkeys(key for run in runs for key in run.metrics.names)
    own = [key for key in logged if key not in drawn and not _NOT_DRAWN.fullmatch(key)]
    groups = {title: (*specs, *_found(title, runs, list(logged))) for title, specs in GROUPS.items()}
    return groups | {"More metrics": tuple(ChartSpec(printable(key, 100), {key: printable(key, 100)}) for key in own)}


def _found(group: str, runs: Sequence[Run], logged: Sequence[str]) -> list[ChartSpec]:
    """Make the specs that depend on which metrics were logged: parts of the reward and of the time, pass@k, held-out
    loss."""
    if group == "Reward":
        parts = {key: printable(key.partition("/")[2], 60) for key in logged if key.startswith("rewards/")}
        evaluated = dict.fromkeys(key for run in runs for key in run.evaluations.names)
        passed = {key: printable(key, 80) for key in evaluated if re.fullmatch(r"(.+/)?pass@\d+", key)}
        of_sets = {kind: _of_sets(f"{kind}_reward", evaluated) for kind in ("greedy", "sampled")}
        specs = [
            ChartSpec("Parts of the reward", parts, unit="mean", compare_each=True),
            *(ChartSpec(f"Held-out sets, {kind}", of_sets[kind], "mean", True, compare_each=True) for kind in of_sets),
            ChartSpec("pass@k", passed, "share of prompts", from_evaluation=True, compare_each=True, from_zero=True),
            ChartSpec("Held-out loss", {"loss": "loss"}, unit="mean of labels", from_evaluation=True),
        ]
        return [spec for spec in specs if spec.metrics and (spec.title != "Held-out loss" or "loss" in evaluated)]
    if group == "Episodes":
        return [spec for spec in (_ended(logged), *_EPISODES, *_tools(logged)) if spec.metrics.keys() & set(logged)]
    if group == "Prompts":
        return [spec for spec in _prompts(runs, logged) if spec.metrics]
    if group == "Time and speed":
        times = {f"time/{name}": name for name in _TIMES if f"time/{name}" in logged}
        times |= {key: printable(key[5:], 60) for key in logged if key.startswith("time/") and key not in times}
        if times:
            return [ChartSpec("Where the time goes", times, "seconds", from_zero=True, stacked=True, wide=True)]
        old = {key: name for key, name in _OLD_TIMES.items() if key in logged}
        return [ChartSpec("Where the time goes", old, "seconds", compare_each=True, from_zero=True)] if old else []
    return []


def _of_sets(metric: str, evaluated: Iterable[str]) -> dict[str, str]:
    return {key: printable(key.rpartition("/")[0], 60) for key in evaluated if key.endswith(f"/{metric}")}


def _ended(logged: Sequence[str]) -> ChartSpec:
    ends = {f"ended_by/{end}": end for end in _ENDS if f"ended_by/{end}" in logged}
    return ChartSpec("How episodes end", ends, "share", from_zero=True, stacked=True, wide=True)


def _prompts(runs: Sequence[Run], logged: Sequence[str]) -> list[ChartSpec]:
    """Make the charts of resting prompts (too easy or hopeless), and of the sources of prompts."""
    evaluated = list(dict.fromkeys(key for run in runs for key in run.evaluations.names))
    resting = {"easy_prompts": "too easy", "hopeless_prompts": "hopeless"}
    rests = {key: name for key, name in resting.items() if key in logged}

    def by_source(title: str, metric: str, unit: str, names: Sequence[str], *, held_out: bool = False) -> ChartSpec:
        found = {key: printable(key.partition("/")[2], 60) for key in names if key.startswith(f"{metric}/")}
        return ChartSpec(title, found, unit, held_out, compare_each=True, from_zero=True)

    return [
        ChartSpec("Prompts that rest", rests, "share of all prompts", compare_each=True, from_zero=True, stacked=True),
        by_source("Held-out reward by source, greedy", "greedy_reward", "mean", evaluated, held_out=True),
        by_source("Held-out reward by source, sampled", "sampled_reward", "mean", evaluated, held_out=True),
        by_source("Training reward by source", "source_reward", "mean of the step's groups", logged),
        by_source("Groups by source", "source_groups", "groups of a step", logged),
        by_source("Too easy prompts by source", "easy_prompts", "share of the source", logged),
        by_source("Hopeless prompts by source", "hopeless_prompts", "share of the source", logged),
    ]


def _tools(logged: Sequence[str]) -> list[ChartSpec]:
    """Make the charts of tool calls, and of the time of calls by tool."""
    calls, seconds = (
        {key: printable(key.partition("/")[2], 60) for key in logged if key.startswith(prefix)}
        for prefix in ("tool_calls/", "tool_time/")
    )
    total = {"tool_calls": "all"} if "tool_calls" in logged else {}
    return [
        ChartSpec("Tool calls", total | calls, "per document", compare_each=True, from_zero=True),
        ChartSpec(
            "Time of a tool call", seconds, "seconds", compare_each=True, from_zero=True, logarithmic_if_wide=True
        ),
    ]
