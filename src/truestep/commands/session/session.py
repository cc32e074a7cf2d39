"""A session: its calls sample, compute gradients, update the weights, save and load."""

import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from truestep.commands.running import configured
from truestep.commands.session.documents import Documents, checked
from truestep.commands.session.errors import SessionError
from truestep.commands.session.gradient import Gradient
from truestep.commands.session.losses import GIVEN_SLOPES, Closure, Loss, PartsOfLosses, needs_whole_step, with_slopes
from truestep.commands.session.samples import Prompt, Sample, default_options, ids_of, with_options
from truestep.commands.session.twins import twin
from truestep.commands.session.updates import check_rate, set_options
from truestep.config.schema import Config
from truestep.config.sections import InProcessSampler
from truestep.generate.engine.phase import EngineSettings
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.generator import Completion, Generate, R, Request, T, completing, run_all
from truestep.generate.groups import DRAWS
from truestep.generate.read import reader
from truestep.losses.label_losses import LabelLoss
from truestep.losses.objective import ONE_OF_EACH
from truestep.metrics.types import Sum
from truestep.model.policy import Policy
from truestep.process.randomness import seed_random
from truestep.ranks.group import leave
from truestep.ranks.watch import Watch
from truestep.run.assemble.policy import join_ranks, make_policy
from truestep.run.assemble.sources import engine_settings
from truestep.run.assemble.step import (
    check_custom_code,
    make_learning_rate,
    make_optimizer,
    make_rule,
    make_runner,
)
from truestep.run.checkpoint.saves import Saves
from truestep.run.checkpoint.store import CheckpointStore, Progress, read_progress
from truestep.step.compute.runner import Accumulated, StepRunner
from truestep.step.learner import Learner
from truestep.step.plan.plan import plan_exactly, totals_of
from truestep.step.update.gradient_clipping import explain_useless
from truestep.step.update.optimizer import optimizer_parts, restore_optimizer
from truestep.tools.export import export
from truestep.types import DocumentScore, Rollout, StepPlan, StepTotals
from truestep.weights.finite import some
from truestep.weights.tensor_parts import FOLDER, StoredTensors


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
    """The number of updates so far."""
    documents_seen: int
    """The number of documents in these updates."""
    adapters: dict[str, "Session"]
    """The adapters over this session's model, by the names that `adapter` gave them."""
    _sampled: int  # the number of prompts that were sampled from

    def __init__(self, config: Config | str | Path, *, weights: str | Path | None = None, base: Policy | None = None):
        """Load the model of a configuration, or a checkpoint that `save` or a run wrote (`weights`). `base`: a policy
        of the same model, whose frozen weights an adapter shares."""
        self.config = configured(config)
        if base is not None and self.config.adapter is None:
            raise SessionError("without the section adapter all weights are trained, and none can be shared")
        if self.config.data.truncated == "drop":
            raise SessionError("data.truncated: drop leaves documents without a score: a session takes keep or mask")
        if self.config.deterministic:
            torch.use_deterministic_algorithms(True)
        check_custom_code(self.config)
        seed_random(self.config.seed)
        self._base, self.adapters = base, {}
        self._ranks = join_ranks(self.config) if base is None else base.weights.ranks
        self._learning_rate = make_learning_rate(self.config)
        self._learner: Learner | None = None
        self._gradient: Gradient | None = None
        self._parts = PartsOfLosses(self.config, self._ranks)
        self.load(weights)

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def close(self) -> None:
        if self._base is None:
            leave()

    def adapter(self, name: str, *, weights: str | Path | None = None, **options: Any) -> "Session":
        """Return the adapter of this name: a session that shares this model's weights, and has its own LoRA matrices,
        optimizer, gradient, steps and versions. The first call makes it, from the checkpoint `weights` if given.
        `options` replace options of the section `adapter` (rank, alpha, targets, path), and `seed`."""
        if name not in self.adapters:
            if self.config.adapter is None:
                raise SessionError(
                    "the configuration has no section adapter: this session trains the model's own weights"
                )
            given = {"seed": options.pop("seed", self.config.seed)}
            given |= {f"adapter.{option}": value for option, value in options.items()}
            self.adapters[name] = Session(self.config.changed(given), weights=weights, base=self.policy)
        elif options or weights is not None:
            raise SessionError(f"the adapter {name} exists already: remove it first, or give no options")
        return self.adapters[name]

    def remove(self, name: str) -> None:
        """Remove an adapter, and free its memory."""
        if name not in self.adapters:
            raise SessionError(f"there is no adapter {name}: there are {', '.join(self.adapters) or 'none'}")
        del self.adapters[name]

    @property
    def policy(self) -> Policy:
        return self._here.policy

    @property
    def has_weights(self) -> bool:
        """Tell whether there are weights: a load or an update that fails leaves none."""
        return self._learner is not None

    @property
    def tokenizer(self) -> Any:
        return self.policy.tokenizer

    @property
    def _here(self) -> Learner:
        if self._learner is None:
            raise SessionError("the session has no weights, since a load or an update failed: load a checkpoint")
        return self._learner

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Return a context that watches one call. If a rank stalls or dies during the call, all ranks end with an error
        that names this rank. The time between two calls is not limited."""
        watch = Watch(self._ranks, self.config.schedule.stall_timeout)
        watch.phase(what)
        with watch.watching():
            yield

    # Documents

    def documents(self, records: Documents, *, needs_all: bool = True) -> list[Rollout]:
        """Check records like those of a file, and compute advantages. All records of a group must be in the same call.
        Without `needs_all`, records may lack log-probs, rewards and advantages."""
        return self._checked(records, self.config if needs_all else None)

    def totals(self, documents: Documents) -> StepTotals:
        """Count documents and labels: the totals of a step, for `forward_backward`."""
        return totals_of(self._checked(documents, None))

    def with_targets(self, documents: Documents, tokens: Sequence[int]) -> list[Rollout]:
        """Return for each document, and for each of these tokens in turn, the document with that token in the place of
        its labels: `forward` gives the token's log-prob where a label stands, and a loss that is a function may use it.
        The difference of two tokens' log-probs is a linear function of the hidden state: the value of a value model."""
        wrong = [token for token in tokens if not 0 <= token < self.policy.vocabulary_size]
        if wrong or not len(tokens):
            raise SessionError(f"with_targets: the tokens are {list(tokens)}: give ids of the vocabulary")
        return [
            replace(one, id=f"{one.id}.{token}", targets=np.full(one.num_tokens, token, np.int64))
            for one in self._checked(documents, None)
            for token in tokens
        ]

    def _checked(self, records: Documents, needs: Config | None) -> list[Rollout]:
        return checked(records, self.config, self.policy, prefix=self.documents_seen, needs=needs)

    # Passes

    def forward(self, documents: Documents) -> list[DocumentScore]:
        """Compute the log-probs and entropies of the labels of each document."""
        made = self._checked(documents, None)
        plan = self._plan([with_slopes(document, np.zeros(document.num_labels, np.float32)) for document in made])
        runner = self._linear_runner
        with self._doing("computing a forward pass"):
            scores = runner.accumulate(plan, backward=False).scores
        runner.stopwatch.drain()
        return list(scores)

    def logprobs(self, documents: Documents) -> list[np.ndarray]:
        """Compute the log-probs of the labels of each document."""
        return [score.logprobs for score in self.forward(documents)]

    def forward_backward(
        self, documents: Documents, loss: Loss = None, *, totals: StepTotals | None = None
    ) -> list[DocumentScore]:
        """Add the gradient of a loss over documents to that of the step; return the documents' log-probs and entropies.

        `loss`: the section `loss` of a configuration, a `LabelLoss`, or a function from the log-probs of each document
        and the documents to one number, which is not divided by anything. None: the session's own loss.
        `totals`: the counts of the whole step, if they are known. Denominators are then applied in this call, and the
        results are bitwise those of `train`. Without `totals`, `step` applies denominators, counted over all calls.
        """
        if callable(loss) and not isinstance(loss, LabelLoss):
            if totals is not None:
                raise SessionError("the number that a function returns is not divided by anything: leave out `totals`")
            return self._by_autograd(documents, loss)
        parts = self._parts.of(loss, self._here.runner)
        made = self._checked(documents, parts.config)
        plan = self._plan(made)
        counts, kind, counted = totals_of(made), object(), None
        complete = needs_whole_step(parts.objective, made, has_router_terms=self._has_router_terms)
        if complete:
            if totals != counts or self._gradient is not None:
                raise SessionError(
                    f"{complete} needs all documents of the step in one call: give `totals=session.totals(documents)`"
                )
        elif totals is None:
            if parts.objective.step_scale(counts) is None:
                raise SessionError("loss.entropy_normalize_by differs from loss.normalize_by: give `totals`")
            kind, counted = (parts.objective.denominator, parts.objective.gradient_divisor), parts.objective
        else:
            kind = totals
        self._check_accepts(kind)
        runner = replace(self._here.runner, objective=parts.objective)
        if loss is not None:  # it may have a gradient even if an advantage is 0
            runner = replace(runner, skip_zero_advantage=False)

        def compute() -> Accumulated:
            annotated = replace(parts.annotators.annotate(plan), totals=totals or ONE_OF_EACH)
            return runner.accumulate(annotated, first=self._gradient is None, last=False)

        return self._add(compute, counts, Gradient(kind, counted, complete))

    def _add(self, compute: Callable[[], Accumulated], totals: StepTotals, begun: Gradient) -> list[DocumentScore]:
        """Run `compute`, which adds to the step's gradient, and sum its metrics. In the first call of a step, `begun`
        becomes the step's gradient. If `compute` fails, drop the gradient: it may have a part of this call."""
        with self._doing("computing a gradient"):
            try:
                accumulated = compute()
            except BaseException:
                self.drop()
                raise
        self._gradient = self._gradient or begun
        self._gradient.add(totals, accumulated.metrics, accumulated.loads)
        return list(accumulated.scores)

    def _by_autograd(self, documents: Documents, loss: Closure) -> list[DocumentScore]:
        if self._has_router_terms:
            raise SessionError(
                "a loss that is a function of log-probs cannot have the terms of routers: set model.experts.balance to "
                "none and model.experts.z_loss to 0, or name a loss by its type"
            )
        self._check_accepts("a function")
        made = self._checked(documents, None)
        scores = self.forward(made)
        leaves = [torch.tensor(score.logprobs, requires_grad=True) for score in scores]
        with torch.enable_grad():
            value = loss(leaves, made)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise SessionError("the loss must give one number that is computed from the log-probs")
        value.backward()
        slopes = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
        weighted = [with_slopes(document, slope.numpy()) for document, slope in zip(made, slopes, strict=True)]
        plan = replace(self._plan(weighted), totals=ONE_OF_EACH)
        runner = self._linear_runner

        def compute() -> Accumulated:
            accumulated = runner.accumulate(plan, first=self._gradient is None, last=False)
            return replace(accumulated, metrics=accumulated.metrics | {"loss": Sum(float(value.detach()))})

        return self._add(compute, totals_of(made), Gradient("a function", None))

    @property
    def _linear_runner(self) -> StepRunner:
        """The runner for log-probs, and for gradients with the documents' slopes and no denominator."""
        return replace(self._here.runner, objective=GIVEN_SLOPES, metrics_level=None, skip_zero_advantage=False)

    def _check_accepts(self, kind: object) -> None:
        if self._gradient is not None:
            self._gradient.check_accepts(kind)

    @property
    def _has_router_terms(self) -> bool:
        return self.policy.routing is not None and self.policy.routing.settings.has_terms

    def _plan(self, documents: Sequence[Rollout]) -> StepPlan:
        if not documents:
            raise SessionError("there are no documents")
        return plan_exactly(documents, make_rule(self.config, self.policy), self.documents_seen)

    # Updates

    def gradient_norm(self) -> float:
        """Compute the norm of the step's gradient, before clipping. The step then accepts no further documents."""
        open_ = self._whole()
        if open_.norm is None:
            try:
                with self._doing("computing the gradient's norm"):
                    if not open_.reduced:
                        self._here.runner.reduce()
                        open_.reduced = True
                    open_.norm = self._here.gradient_norm() * open_.scale
            except BaseException:  # a part of it may be summed over ranks
                self.drop()
                raise
        return open_.norm

    def step(self, learning_rate: float | None = None, **options: float | None) -> dict[str, Any]:
        """Update the weights by the step's gradient. Return the step's metrics. By default, the learning rate and
        `options` are the configuration's for this step. `options`: beta1, beta2, epsilon, weight_decay of AdamW, and
        gradient_clip."""
        if learning_rate is not None:
            check_rate(learning_rate)
        norm, open_, learner = self.gradient_norm(), self._whole(), self._here
        learner.gradient_clip = set_options(learner.optimizer, self.config.optimizer, options)
        if not learner.usable(norm):
            self.drop()
            raise SessionError(f"{explain_useless(norm, learner.gradient_clip)}; nothing was updated")
        rate = self._learning_rate.at(self.steps + 1) if learning_rate is None else learning_rate
        self._learner = self._gradient = None  # a failed update may have changed some of the weights
        with self._doing("updating the weights"):
            learner.update(rate, norm, open_.loads, open_.scale)
            ruined = learner.update_check.ruined()
        if ruined:
            raise SessionError(f"the update left weights that are not finite: {some(ruined)}. Load the last checkpoint")
        learner.runner = learner.runner.steered(open_.metrics)
        learner.runner.stopwatch.drain()
        self._learner, self.steps = learner, self.steps + 1
        self.documents_seen += open_.totals.num_documents
        return {"step": self.steps, **open_.line(), "grad_norm": norm, "learning_rate": rate}

    def drop(self) -> None:
        """Discard the gradient of the current step."""
        if self._learner is not None:
            self._learner.forget_gradient()
        self._gradient = None

    def _whole(self) -> Gradient:
        if self._gradient is None:
            raise SessionError("there is no gradient: call forward_backward first")
        return self._gradient

    # Sampling

    def sample(self, prompts: Sequence[Prompt], count: int = 1, **options: Any) -> list[list[Sample]]:
        """Draw `count` completions of each prompt with the current weights. A prompt is text, chat messages or
        token ids. `options`: temperature, max_new_tokens, top_p, top_k, min_p, stop, as in `sampler`."""
        if count < 1:
            raise SessionError(f"sample: count is {count}: draw one completion of a prompt or more")
        parallel = self.config.parallel
        if parallel.pipeline > 1 or parallel.expert > 1:
            raise SessionError("sample: parallel.pipeline and parallel.expert divide layers, which sampling cannot use")
        draw = with_options(default_options(self.config.sampler, self.policy), options)
        items = list(enumerate(ids_of(prompts, self.policy), self._sampled))
        drawn = self._drawn(
            [
                [Request(ids, draw, (self.config.seed, DRAWS, number, member)) for member in range(count)]
                for number, ids in items
            ]
        )
        self._sampled += len(items)
        read: Callable[[Sequence[int]], str] = (lambda _: "") if self.tokenizer is None else reader(self.policy)
        return [
            [Sample.of(ids, one, read(one.token_ids), draw.temperature, self.documents_seen) for one in completions]
            for (_, ids), completions in zip(items, drawn, strict=True)
        ]

    def complete(
        self, requests: Sequence[Request], done: Callable[[int, Completion], None] = lambda number, completion: None
    ) -> list[Completion]:
        """Complete requests of token ids, each with its own options and seed, with the current weights. `done` is
        called with the number and the completion of each request as soon as it ends."""
        return self._mapped(list(enumerate(requests)), completing(done))

    def _drawn(self, requests: Sequence[Sequence[Request]]) -> list[list[Completion]]:
        def work(of_item: Sequence[Request], generate: Generate) -> Coroutine[Any, Any, list[Completion]]:
            return run_all([_completed(generate, request) for request in of_item])

        return self._mapped(requests, work)

    def _mapped(self, items: Sequence[T], work: Callable[[T, Generate], Coroutine[Any, Any, R]]) -> list[R]:
        _ = self._here  # raises if a load or an update has failed; the generator would still sample
        with self._doing("sampling"):
            self._generator.weights(self.documents_seen)
            return self._generator.map(items, work)

    # States

    def save(self, directory: str | Path, *, optimizer: bool = True, leave_open: bool = False) -> Path:
        """Write a checkpoint of weights, optimizer and counts into a directory; return its path. `load`, `Session(...,
        weights=...)` and `truestep export` read it. Without `optimizer`, its state is left out. With
        `leave_open`, the current step may have a gradient; it is kept in memory, but is not part of the checkpoint."""
        return self.write(directory, optimizer=optimizer, leave_open=leave_open, within=self._doing("saving"))

    def write(
        self,
        directory: str | Path,
        *,
        optimizer: bool = True,
        leave_open: bool = False,
        within: AbstractContextManager[None] | None = None,
    ) -> Path:
        """Save as `save` does, without a limit to the time that the disk takes. Another thread may call it, while this
        session changes nothing."""
        if self._gradient is not None and not leave_open:
            raise SessionError("a checkpoint holds no gradient: call step() or drop() before save")
        store, learner = CheckpointStore(Path(directory), keep=2**31), self._here
        there = store.final(self.steps)
        if self._ranks.share(there.exists):
            raise SessionError(f"{there} exists already: remove it, or name another directory")
        queue = {"documents_seen": self.documents_seen, "sampled": self._sampled}
        progress = Progress(self.steps, queue, (), 0, entropy_bonus=learner.runner.objective.steered_weight)
        saves = Saves(store, self._ranks)
        with within or nullcontext():
            parts = optimizer_parts(learner.optimizer, self.policy.weights) if optimizer else iter(())
            complete = saves.begin(self.policy, parts, progress, self.documents_seen) or saves.finish()
            saves.close()
        assert complete is not None
        return complete.path

    def load(self, checkpoint: str | Path | None, *, optimizer: bool = True) -> None:
        """Load a checkpoint, or with None the configuration's model. The current step's gradient is dropped. The random
        state of the process becomes the checkpoint's. Without `optimizer`, the optimizer starts with a new state."""
        config, path = self.config, None if checkpoint is None else Path(checkpoint)
        if path is not None and not (path / FOLDER / "state.json").is_file():
            raise SessionError(f"{path} is no checkpoint of truestep; the directory of a model is given as model.path")
        progress = Progress(0, {"documents_seen": 0}, (), 0) if path is None else read_progress(path, self._ranks.rank)
        base = self.policy if self._base is None and self.adapters else self._base
        self._learner = self._gradient = None  # free it first: two models may not fit the device
        self._parts.clear()
        with self._doing("loading the model"):
            policy = make_policy(config, self._ranks, None if path is None else str(path), base=base)
            made = make_optimizer(config, policy.weights)
            runner = replace(make_runner(config, policy), keep_scores=True, compares=None)
            if path is not None and optimizer:
                restore_optimizer(made, policy.weights, StoredTensors(path))
        settings = EngineSettings(waves=config.deterministic)
        if isinstance(config.sampler, InProcessSampler):
            settings = engine_settings(config.sampler, config.deterministic)
        self._generator = EngineGenerator(policy, settings)
        self._learner = Learner(runner.with_entropy_bonus(progress.entropy_bonus), made, config.optimizer.gradient_clip)
        self.steps, self.documents_seen = progress.step, int(progress.queue["documents_seen"])
        self._sampled = int(progress.queue.get("sampled", 0))

    def export(self, output: str | Path, *, dtype: str = "bfloat16") -> None:
        """Write the weights as a Hugging Face directory. An adapter is merged into its model."""
        output = Path(output).absolute()

        def folder() -> str:
            output.parent.mkdir(parents=True, exist_ok=True)
            return tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}.")

        with _removed(self._ranks.share(folder), self._ranks.first) as place:
            checkpoint = self.save(place)
            self._ranks.share(lambda: str(export(checkpoint, output, dtype)))

    # Asynchronous twins

    def check_one_process(self) -> None:
        if self._ranks.size > 1:
            raise SessionError("the asynchronous methods are for one process: under torchrun call the others")

    forward_async, logprobs_async = twin(forward), twin(logprobs)
    forward_backward_async, gradient_norm_async, step_async = twin(forward_backward), twin(gradient_norm), twin(step)
    sample_async, complete_async = twin(sample), twin(complete)
    save_async, load_async, export_async = twin(save), twin(load), twin(export)


@contextmanager
def _removed(folder: str, here: bool) -> Iterator[Path]:
    """Remove a folder at the end, on the rank that made it."""
    try:
        yield Path(folder)
    finally:
        if here:
            shutil.rmtree(folder, ignore_errors=True)


async def _completed(generate: Generate, request: Request) -> Completion:
    return await generate(request)
