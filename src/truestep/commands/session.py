"""A loop of one's own in Python: sample, compute gradients, update, over the parts that `train` is made of."""

import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from truestep.commands.running import configured
from truestep.config.schema import Config
from truestep.config.sections import InProcessSampler
from truestep.environments.prompts import tokenise
from truestep.errors import TruestepError
from truestep.generate.engine.phase import EngineSettings
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.generator import Completion, DrawOptions, Generate, Request, run_all
from truestep.generate.groups import DRAWS
from truestep.generate.read import reader, stop_ids
from truestep.losses.label_losses import LabelLoss, LabelTerm
from truestep.losses.labels import Labels
from truestep.losses.objective import ONE_OF_EACH, Denominator, Objective
from truestep.metrics.loads import Counts
from truestep.metrics.types import Metric, merge, values
from truestep.model.policy import Policy
from truestep.process.randomness import seed_random
from truestep.ranks.group import leave
from truestep.ranks.watch import Watch
from truestep.rollouts.files import check_records
from truestep.rollouts.record import Needs
from truestep.run.assemble.policy import join_ranks, make_policy
from truestep.run.assemble.sources import checks_of, draw_options, engine_settings, replayed_by
from truestep.run.assemble.step import (
    check_custom_code,
    make_annotators,
    make_learning_rate,
    make_objective,
    make_optimizer,
    make_rule,
    make_runner,
)
from truestep.run.checkpoint.saves import Saves
from truestep.run.checkpoint.store import CheckpointStore, Progress, read_progress
from truestep.step.before.annotators import Annotators
from truestep.step.learner import Learner
from truestep.step.plan.plan import plan_exactly, totals_of
from truestep.step.update.gradient_clipping import explain_useless
from truestep.step.update.optimizer import optimizer_parts, restore_optimizer
from truestep.tools.export import export
from truestep.types import DocumentScore, Rollout, StepPlan, StepTotals
from truestep.weights.finite import some
from truestep.weights.tensor_parts import StoredTensors

# A loss of one's own: from the log-probs of each document's labels to one number, which autograd differentiates.
Closure = Callable[[list[torch.Tensor], Sequence[Rollout]], torch.Tensor]
Loss = Mapping[str, Any] | LabelLoss | Closure | None
Documents = Sequence[Rollout | Mapping[str, Any]]

_TERMS = ("loss", "policy_loss", "kl_reference", "kl_cov", "entropy_bonus", "z_loss")  # metrics with a denominator


class SessionError(TruestepError):
    """The session's methods were called in an order that has no meaning, or with what they cannot use."""


@dataclass(frozen=True)
class Sample:
    """A completion that the policy drew."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of its tokens, at the temperature
    text: str  # without special tokens; empty if the model has no tokenizer
    stopped: bool  # by itself, not by the limit of tokens
    temperature: float
    version: int  # documents that the policy had been trained on

    def record(self, **fields: Any) -> dict[str, Any]:
        """Return a record to train on (docs/rollouts.md). `fields` are its others: reward, group_id, advantage."""
        return {
            "input_ids": [*self.prompt_ids, *self.token_ids],
            "prompt_length": len(self.prompt_ids),
            "logprobs": list(self.logprobs),
            "temperature": self.temperature,
            "truncated": not self.stopped,
            "model_version": self.version,
            **fields,
        }


@dataclass(frozen=True)
class _Given(LabelLoss):
    """A loss whose slopes are known: they stand in the place of advantages."""

    def __call__(self, labels: Labels) -> LabelTerm:
        return LabelTerm(labels.advantages * labels.logprobs, labels.advantages)


@dataclass
class _Gradient:
    """The gradient of the step that is open."""

    kind: object  # how its calls are divided: they must agree
    counted: Objective | None  # whose denominators are those of all calls; None: they are in the gradient already
    totals: StepTotals = field(default_factory=lambda: StepTotals(0, 0, 0))
    metrics: dict[str, Metric] = field(default_factory=dict)
    loads: Counts | None = None
    norm: float | None = None  # before clipping; set once the gradient is whole

    @property
    def scale(self) -> float:
        """The factor that makes the step's gradient of what the calls have added up."""
        return 1.0 if self.counted is None else self.counted.step_scale(self.totals) or 0.0

    def line(self) -> dict[str, Any]:
        """Return the metrics of all calls, and the step's counts."""
        line: dict[str, Any] = values(self.metrics)
        if self.counted is not None:
            scale = self.counted.denominator.step_scale(self.totals)
            line |= {name: line[name] * scale for name in _TERMS if name in line}
        return line | asdict(self.totals)

    def add(self, totals: StepTotals, metrics: Mapping[str, Metric], loads: Counts | None) -> None:
        counts = {name: count + getattr(totals, name) for name, count in asdict(self.totals).items()}
        self.totals, self.metrics = StepTotals(**counts), merge(self.metrics, metrics)
        if loads is not None:
            before = self.loads or {}
            self.loads = {layer: count + before[layer] if layer in before else count for layer, count in loads.items()}


class Session:
    """A model that is sampled from and trained by calls.

        with Session("run.yaml") as session:
            for prompt, answer in tasks:
                samples = session.sample([prompt], count=8)[0]
                records = [one.record(reward=score(one.text, answer), group_id=prompt) for one in samples]
                session.forward_backward(records)
                session.step()

    Under torchrun each rank makes the same calls with the same arguments, and gets the same results.
    """

    steps: int
    """The updates so far."""
    documents_seen: int
    """The documents of these updates."""
    _learner: Learner
    _generator: EngineGenerator
    _annotators: Annotators
    _gradient: _Gradient | None
    _sampled: int  # prompts

    def __init__(self, config: Config | str | Path, *, weights: str | Path | None = None):
        """Load the model of a configuration, or a checkpoint that `save` or a run wrote (`weights`)."""
        self.config = configured(config)
        if self.config.deterministic:
            torch.use_deterministic_algorithms(True)
        check_custom_code(self.config)
        self._ranks = join_ranks(self.config)
        self._open = ExitStack()
        self._watch = Watch(self._ranks, self.config.schedule.stall_timeout)
        self._open.enter_context(self._watch.watching())
        self._learning_rate = make_learning_rate(self.config)
        self.load(weights)

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, traceback)
        if kind is None:
            leave()

    def close(self) -> None:
        self.__exit__(None, None, None)

    @property
    def policy(self) -> Policy:
        return self._learner.policy

    @property
    def tokenizer(self) -> Any:
        return self.policy.tokenizer

    # Documents

    def documents(self, records: Documents, *, needs_all: bool = True) -> list[Rollout]:
        """Check records as those of a file are checked, and compute the advantages of groups. Without `needs_all` they
        may lack log-probs, rewards and advantages."""
        if all(isinstance(record, Rollout) for record in records):
            return [record for record in records if isinstance(record, Rollout)]
        routes = replayed_by(self.config, self.policy)
        checks = checks_of(self.config, self.policy.vocabulary_size, lambda: self.tokenizer, routes)
        if not needs_all:
            checks = replace(checks, needs=Needs(logprobs=False, advantages=False, advantage_rule="none"))
        named = (
            {"id": f"{self.documents_seen}.{number}", **record} if isinstance(record, Mapping) else record
            for number, record in enumerate(records)
        )
        return list(check_records(named, checks))

    def totals(self, documents: Documents) -> StepTotals:
        """Count documents and labels: the totals of a step, for `forward_backward`."""
        return totals_of(self.documents(documents, needs_all=False))

    # Passes

    def forward(self, documents: Documents) -> list[DocumentScore]:
        """Compute the log-probs and entropies of the labels of each document."""
        self._watch.phase("computing a forward pass")
        made = self.documents(documents, needs_all=False)
        runner = replace(self._learner.runner, objective=_linear(), metrics_level=None, skip_zero_advantage=False)
        without = [_with_slopes(document, np.zeros(document.num_labels, np.float32)) for document in made]
        return list(runner.accumulate(self._plan(without), backward=False).scores)

    def logprobs(self, documents: Documents) -> list[np.ndarray]:
        """Compute the log-probs of the labels of each document."""
        return [score.logprobs for score in self.forward(documents)]

    def forward_backward(
        self, documents: Documents, loss: Loss = None, *, totals: StepTotals | None = None
    ) -> list[DocumentScore]:
        """Add the gradient of a loss over documents to that of the step; return the documents' log-probs.

        `loss`: the section `loss` of a configuration, a `LabelLoss`, or a function from the log-probs of each document
        and the documents to one number, which is not divided by anything. None: the session's own.
        `totals`: the counts of the whole step, if they are known. Without them, denominators are counted over all calls
        and applied by `step`; with them at once, as `train` does, so that its numbers are the same bit for bit.
        """
        self._watch.phase("computing a gradient")
        if self._gradient is not None and self._gradient.norm is not None:
            raise SessionError("the gradient of this step is whole: call step() or drop() before forward_backward")
        if callable(loss) and not isinstance(loss, LabelLoss):
            return self._by_autograd(documents, loss)
        objective = self._objective(loss)
        supervised = objective.label_loss.supervised
        made = self.documents(documents, needs_all=loss is None or not supervised)
        plan = self._annotators.annotate(self._plan(made))
        if totals is not None:
            return self._backward(replace(plan, totals=totals), objective, totals_of(made), totals)
        if self._has_router_terms:
            raise SessionError("model.experts: terms of routers need the counts of the whole step: give `totals`")
        if any(document.difference is not None for document in made):
            raise SessionError("data.advantages over a step need the counts of the whole step: give `totals`")
        if objective.step_scale(totals_of(made)) is None and objective.entropy_bonus:
            raise SessionError("loss.entropy_normalize_by differs from loss.normalize_by: give `totals`")
        plan, kind = replace(plan, totals=ONE_OF_EACH), (objective.denominator.normalize_by, objective.gradient_divisor)
        return self._backward(plan, objective, totals_of(made), kind, counted=objective)

    def _by_autograd(self, documents: Documents, loss: Closure) -> list[DocumentScore]:
        made = self.documents(documents, needs_all=False)
        scores = self.forward(made)
        leaves = [torch.tensor(score.logprobs, requires_grad=True) for score in scores]
        with torch.enable_grad():
            value = loss(leaves, made)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise SessionError("the loss must give one number that is computed from the log-probs")
        value.backward()
        slopes = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
        weighted = [_with_slopes(document, slope.numpy()) for document, slope in zip(made, slopes, strict=True)]
        plan = replace(self._plan(weighted), totals=ONE_OF_EACH)
        return self._backward(plan, _linear(), totals_of(made), "a function")

    def _backward(
        self,
        plan: StepPlan,
        objective: Objective,
        totals: StepTotals,
        kind: object,
        *,
        counted: Objective | None = None,
    ) -> list[DocumentScore]:
        if (open_ := self._gradient) is not None and open_.kind != kind:
            raise SessionError(
                "the calls of a step must be divided alike: all by their own count, by one normalize_by, or all by the "
                "same `totals`, or all by functions"
            )
        runner = replace(self._learner.runner, objective=objective)
        accumulated = runner.accumulate(plan, first=open_ is None, last=False)
        self._gradient = open_ or _Gradient(kind, counted)
        self._gradient.add(totals, accumulated.metrics, accumulated.loads)
        return list(accumulated.scores)

    # Updates

    def gradient_norm(self) -> float:
        """Compute the norm of the step's gradient, before clipping. The step takes no further documents."""
        open_ = self._whole()
        if open_.norm is None:
            self._watch.phase("computing the gradient's norm")
            self._learner.runner.reduce()
            open_.norm = self._learner.gradient_norm() * open_.scale
        return open_.norm

    def step(self, learning_rate: float | None = None) -> dict[str, Any]:
        """Update the weights by the step's gradient. Return the step's metrics. The learning rate is by default the
        configuration's for this step."""
        self._watch.phase("updating the weights")
        norm, open_, learner = self.gradient_norm(), self._whole(), self._learner
        if not learner.usable(norm):
            self.drop()
            raise SessionError(f"{explain_useless(norm, learner.gradient_clip)}; nothing was updated")
        rate = self._learning_rate.at(self.steps + 1) if learning_rate is None else learning_rate
        learner.update(rate, norm, open_.loads, open_.scale)
        if ruined := learner.update_check.ruined():
            raise SessionError(f"the update left weights that are not finite: {some(ruined)}. Load the last checkpoint")
        learner.runner = learner.runner.steered(open_.metrics)
        self._gradient, self.steps = None, self.steps + 1
        self.documents_seen += open_.totals.num_documents
        return {"step": self.steps, **open_.line(), "grad_norm": norm, "learning_rate": rate}

    def drop(self) -> None:
        """Forget the gradient of the step that is open."""
        self._learner.forget_gradient()
        self._gradient = None

    def _whole(self) -> _Gradient:
        if self._gradient is None:
            raise SessionError("there is no gradient: call forward_backward first")
        return self._gradient

    # Sampling

    def sample(
        self, prompts: Sequence[str | Sequence[int] | Sequence[Mapping[str, Any]]], count: int = 1, **options: Any
    ) -> list[list[Sample]]:
        """Draw `count` completions of each prompt with the weights as they are. A prompt is text, chat messages or
        token ids. `options`: temperature, max_new_tokens, top_p, top_k, min_p, stop, as in `sampler`."""
        self._watch.phase("sampling")
        options, draw = dict(options), self._draw_options()
        if "stop" in options:
            options["stop"] = tuple(options["stop"])
        if unknown := sorted(set(options) - {*DrawOptions.__dataclass_fields__} | {"stop_ids"} & set(options)):
            raise SessionError(f"sample: {', '.join(unknown)} is unknown")
        draw = replace(draw, **options)
        read = (lambda _: "") if self.tokenizer is None else reader(self.policy)
        items = [(self._sampled + number, self._ids(prompt)) for number, prompt in enumerate(prompts)]

        def work(item: tuple[int, tuple[int, ...]], generate: Generate) -> Coroutine[Any, Any, list[Completion]]:
            number, ids = item
            seeds = ((self.config.seed, DRAWS, number, member) for member in range(count))
            return run_all([_completed(generate, Request(ids, draw, seed)) for seed in seeds])

        self._generator.weights(self.documents_seen)
        drawn = self._generator.map(items, work)
        self._sampled += len(items)
        return [
            [
                Sample(
                    ids,
                    tuple(one.token_ids),
                    tuple(one.logprobs),
                    read(one.token_ids),
                    one.stopped,
                    draw.temperature,
                    self.documents_seen,
                )
                for one in completions
            ]
            for (_, ids), completions in zip(items, drawn, strict=True)
        ]

    def _draw_options(self) -> DrawOptions:
        if isinstance(self.config.sampler, InProcessSampler):
            return draw_options(self.config.sampler, self.policy)
        return DrawOptions(1.0, 256, stop_ids(self.policy))

    def _ids(self, prompt: str | Sequence[Any]) -> tuple[int, ...]:
        if not isinstance(prompt, str) and prompt and all(isinstance(token, (int, np.integer)) for token in prompt):
            return tuple(int(token) for token in prompt)
        return tokenise(prompt if isinstance(prompt, str) else list(prompt), self.tokenizer, "sample")

    # States

    def save(self, directory: str | Path) -> Path:
        """Write a checkpoint of weights, optimizer and counts into a directory; return its path. `load`, `Session(...,
        weights=...)` and `truestep export` read it."""
        self._watch.phase("saving")
        if self._gradient is not None:
            raise SessionError("a checkpoint holds no gradient: call step() or drop() before save")
        store = CheckpointStore(Path(directory), keep=2**31)
        saves = Saves(store, self._ranks)
        queue = {"documents_seen": self.documents_seen, "sampled": self._sampled}
        progress = Progress(self.steps, queue, (), 0, entropy_bonus=self._learner.runner.objective.steered_weight)
        parts = optimizer_parts(self._learner.optimizer, self.policy.weights)
        complete = saves.begin(self.policy, parts, progress, self.documents_seen) or saves.finish()
        saves.close()
        assert complete is not None
        return complete.path

    def load(self, checkpoint: str | Path | None) -> None:
        """Go back to a checkpoint, or with None to the configuration's model. A gradient that is open is dropped."""
        self._watch.phase("loading the model")
        config, path = self.config, None if checkpoint is None else Path(checkpoint)
        policy = make_policy(config, self._ranks, None if path is None else str(path))
        optimizer = make_optimizer(config, policy.weights)
        runner = replace(make_runner(config, policy), keep_scores=True, compares=None)
        seed_random(config.seed)
        self.steps = self.documents_seen = self._sampled = 0
        if path is not None:
            progress = read_progress(path, self._ranks.rank)
            restore_optimizer(optimizer, policy.weights, StoredTensors(path))
            runner = runner.with_entropy_bonus(progress.entropy_bonus)
            self.steps, self.documents_seen = progress.step, int(progress.queue["documents_seen"])
            self._sampled = int(progress.queue.get("sampled", 0))
        self._learner, self._gradient = Learner(runner, optimizer, config.optimizer.gradient_clip), None
        self._annotators = make_annotators(
            config, runner, lambda of: make_policy(config, self._ranks, of or config.model.path, frozen=True)
        )
        sampler = config.sampler
        settings = (
            engine_settings(sampler, config.deterministic)
            if isinstance(sampler, InProcessSampler)
            else EngineSettings(waves=config.deterministic)
        )
        self._generator = EngineGenerator(policy, settings)

    def export(self, output: str | Path, *, dtype: str = "bfloat16") -> None:
        """Write the weights as a Hugging Face directory. An adapter is merged into its model."""
        output = Path(output)

        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
            checkpoint = self.save(self._ranks.share(lambda: folder))
            self._ranks.share(lambda: str(export(checkpoint, output, dtype)))

    def _plan(self, documents: Sequence[Rollout]) -> StepPlan:
        if not documents:
            raise SessionError("there are no documents")
        return plan_exactly(documents, make_rule(self.config, self.policy), self.documents_seen)

    def _objective(self, loss: Mapping[str, Any] | LabelLoss | None) -> Objective:
        own = self._learner.runner.objective
        if loss is None:
            return own
        if isinstance(loss, LabelLoss):
            return replace(own, label_loss=loss)
        return make_objective(self.config.changed({"loss": dict(loss)}))

    @property
    def _has_router_terms(self) -> bool:
        return self.policy.routing is not None and self.policy.routing.settings.has_terms


async def _completed(generate: Generate, request: Request) -> Completion:
    return await generate(request)


def _linear() -> Objective:
    """Return the objective whose slopes are the documents' own, without any denominator."""
    return Objective(_Given(), Denominator("constant", max_labels=1))


def _with_slopes(document: Rollout, slopes: np.ndarray) -> Rollout:
    """Put the slopes of a document's labels in the place of its advantages."""
    at_tokens = np.zeros(document.num_tokens, np.float32)
    at_tokens[document.loss_mask] = slopes
    return replace(document, advantages=at_tokens, difference=None)
