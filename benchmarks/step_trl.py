"""The step of TRL's GRPOTrainer on given documents, with one set of settings after another.

    python benchmarks/step_trl.py GIVEN MADE

`step.py --trl` runs this in a process of its own, which knows nothing of truestep: that process patches transformers.
TRL's own loop does the work, `GRPOTrainer.train()`: its loss, its heads, the backward pass, clipping and AdamW. What is
replaced is where a batch comes from: from the given documents, not from a sampler. A row that fails says so, and the
next one runs. GIVEN and MADE are files of `torch.save`; `beside_trl.py` writes the one and reads the other.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # before the imports that read it

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from transformers.utils import import_utils
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad

WARM = 2  # steps that are not timed
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Document = dict[str, Any]  # ids and old [T], the number of tokens of its prompt, and its advantage


@dataclass(frozen=True)
class Settings:
    """One way to run TRL. What `config` and `model` do not name is as TRL has it."""

    name: str
    batch: int = 8
    config: dict[str, Any] = field(default_factory=dict)  # of GRPOConfig
    model: dict[str, Any] = field(default_factory=dict)  # of from_pretrained
    by_length: bool = False  # documents are sorted; otherwise they keep their order
    padded_to: str = "batch"  # to its longest document, or to that of the whole step, as TRL pads what it sampled
    compiled: str = ""  # each layer by itself: for any shape ("dynamic"), for each shape ("static"), or not at all


@dataclass
class Row:
    """What a way to run TRL takes; `error` where it does not run."""

    name: str
    settings: dict[str, Any]
    story: str = ""
    seconds: float = float("nan")  # a step, the median
    tokens_per_second: float = 0.0  # of documents, without padding
    padding: float = 0.0  # of the tokens that the model sees
    gib: float = float("nan")  # the peak of the timed steps
    loss: float = float("nan")  # of the first step
    norm: float = float("nan")  # of its gradient
    graphs: int = 0
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.name}: {self.error}"
        return (
            f"{self.name}: {self.tokens_per_second:,.0f} tokens/s, {self.seconds:.3f} s, {self.gib:.1f} GiB, "
            f"{self.padding:.1%} padding, {self.story}, {self.graphs} graphs, loss {self.loss:.5f}, "
            f"norm {self.norm:.4f}"
        )


class OnDocuments(GRPOTrainer):
    """TRL's trainer, with batches that are given, in the form in which its sampling makes them."""

    batches: list[dict[str, torch.Tensor]]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        return self.batches[self._step % len(self.batches)]


class Clock(TrainerCallback):
    """Times each step from its first forward pass to the end of its update; the peak is that of the timed steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if len(self.seconds) == WARM and DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.start = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(now() - self.start)


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def cut(documents: list[Document], settings: Settings) -> list[dict[str, torch.Tensor]]:
    """Make a step's batches: prompts are padded on the left, completions on the right, by TRL's own function."""
    if settings.by_length:  # the longest come first: what does not fit fails at once
        documents = sorted(documents, key=lambda document: -len(document["ids"]))
    count = settings.batch if settings.padded_to == "batch" else len(documents)
    batches = []
    for first in range(0, len(documents), count):
        padded = pad_together(documents[first : first + count], settings.config.get("pad_to_multiple_of"))
        parts = {name: value.split(settings.batch) for name, value in padded.items()}
        batches += [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    labels = sum(batch["completion_mask"].sum() for batch in batches)
    return [{name: value.to(DEVICE) for name, value in {**b, "num_items_in_batch": labels}.items()} for b in batches]


def pad_together(documents: list[Document], multiple: int | None) -> dict[str, torch.Tensor]:
    prompts = [document["ids"][: document["prompt"]] for document in documents]
    completions = [document["ids"][document["prompt"] :] for document in documents]
    old = [document["old"][document["prompt"] :] for document in documents]

    def padded(values: list[torch.Tensor], side: str) -> torch.Tensor:
        return pad(values, padding_side=side, pad_to_multiple_of=multiple)

    return {
        "prompt_ids": padded(prompts, "left"),
        "prompt_mask": padded([torch.ones_like(ids) for ids in prompts], "left"),
        "completion_ids": padded(completions, "right"),
        "completion_mask": padded([torch.ones_like(ids) for ids in completions], "right"),
        "old_per_token_logps": padded(old, "right"),
        "advantages": torch.tensor([document["advantage"] for document in documents]),
    }


def make_trainer(given: dict[str, Any], settings: Settings, folder: str) -> OnDocuments:
    batches, steps = cut(given["documents"], settings), WARM + given["steps"]
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=settings.batch,
        gradient_accumulation_steps=len(batches),
        max_steps=steps,
        use_cpu=DEVICE == "cpu",
        num_generations=2,  # nothing is sampled; it has to divide the batch
        model_init_kwargs=settings.model,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings.config,
    )
    words = Tokenizer(WordLevel({"<end>": 0}, unk_token="<end>"))
    trainer = OnDocuments(
        model=given["model"],
        reward_funcs=lambda **_: [],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [""] * (settings.batch * len(batches) * steps)}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>"),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.batches = batches
    if settings.compiled:
        for layer in trainer.model.base_model.layers:
            layer.compile(dynamic=settings.compiled == "dynamic")
    return trainer


def run(given: dict[str, Any], settings: Settings, row: Row) -> None:
    """Train, and write into the row what it took."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, clock = make_trainer(given, settings, folder), Clock()
        weights = {str(weight.dtype).removeprefix("torch.") for weight in trainer.model.parameters()}
        trainer.add_callback(clock)
        trainer.train()
    args, tokens = trainer.args, sum(len(document["ids"]) for document in given["documents"])
    seen = sum(batch[name].numel() for batch in trainer.batches for name in ("prompt_ids", "completion_ids"))
    row.story = (
        f"{'/'.join(sorted(weights))} weights, autocast: {trainer.accelerator.mixed_precision}, "
        f"{'layers recomputed' if args.gradient_checkpointing else 'nothing recomputed'}, "
        f"{trainer.model.config._attn_implementation}, {args.optim.value}, {len(trainer.batches)} batches"
    )
    row.seconds = statistics.median(clock.seconds[WARM:])
    row.tokens_per_second = tokens / row.seconds
    row.padding = 1 - tokens / seen
    row.gib = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else float("nan")
    row.loss, row.norm = (trainer.state.log_history[0][name] for name in ("loss", "grad_norm"))
    row.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]


def measure(given: dict[str, Any], settings: Settings, until: float) -> Row:
    """Run one way; what it held is free again afterwards, also where it failed."""
    row = Row(settings.name, asdict(settings))
    begun = time.monotonic()
    torch._dynamo.utils.counters.clear()
    try:
        if begun > until:
            raise TimeoutError("not run, since the time was up")
        run(given, settings, row)
    except Exception as failure:  # whatever it is, it is this row's result
        row.error = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:300] if str(failure) else ''}"
    torch._dynamo.reset()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    print(f"TRL  {row} ({time.monotonic() - begun:.0f} s in all)", flush=True)
    return row


AS_IT_COMES = (
    Settings("as it comes", padded_to="step"),
    Settings("as it comes, but padded by batch"),
)
BY_HAND = Settings(
    "by hand",
    config={"bf16": False, "gradient_checkpointing": False, "pad_to_multiple_of": 8},  # as tensor cores like it
    model={"dtype": "bfloat16", "attn_implementation": "sdpa"},
    by_length=True,
    compiled="dynamic",
)
LAYERS = "bfloat16 weights, layers compiled"


def search(one: Callable[[Settings], Row]) -> list[Row]:
    """Measure what TRL does by itself, then what is set by hand, then what may be better yet at the best batch."""
    rows = [one(settings) for settings in AS_IT_COMES]
    for batch in (8, 4, 16):
        rows.append(one(replace(BY_HAND, name=f"{LAYERS}, batches of {batch} by length", batch=batch)))
    best = max(rows[len(AS_IT_COMES) :], key=lambda row: row.tokens_per_second)
    chosen = Settings(**best.settings)
    rows.append(one(replace(chosen, name=f"{chosen.name}, not compiled", compiled="")))
    rows.append(one(replace(chosen, name=f"{chosen.name}, one graph a shape", compiled="static")))
    for attention in other_attentions():
        model = {**chosen.model, "attn_implementation": attention}
        rows.append(one(replace(chosen, name=f"{chosen.name}, {attention}", model=model)))
    return rows


def other_attentions() -> list[str]:
    """Name the kernels that are installed; torch's FlexAttention always is. FlashAttention 4 compiles for minutes."""
    found = {
        "flash_attention_2": import_utils.is_flash_attn_2_available(),
        "flex_attention": True,
        "flash_attention_4": import_utils.is_flash_attn_4_available(),
    }
    return [name for name, there in found.items() if there]


def main(path: str, made: str) -> None:
    given = torch.load(path, weights_only=True)
    torch._dynamo.config.recompile_limit = 64
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    until, rows = time.monotonic() + given["seconds"], []
    print(f"TRL  {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}", flush=True)

    def one(settings: Settings) -> Row:
        if not any(words in settings.name for words in given.get("only", [""])):
            return Row(settings.name, asdict(settings), error="left out")
        rows.append(measure(given, settings, until))
        torch.save([asdict(row) for row in rows], made)  # what is done is kept, should a later row hang
        return rows[-1]

    if "settings" in given:
        for settings in given["settings"]:
            one(Settings(**settings))
    else:
        search(one)


if __name__ == "__main__":
    main(*sys.argv[1:])
