"""Computes a step's gradient with DeepSpeed's own engine on the ranks of torchrun, at every stage of ZeRO.

The loss is PipelineRL's: Σ over labels of -min(ρA, clip(ρ)A), over the documents of the step.
"""

from __future__ import annotations

import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from transformers import AutoModelForCausalLM


def document_loss(model: Any, record: dict[str, Any], documents: int) -> torch.Tensor:
    """Compute one document's part of the step's loss, in plain torch."""
    ids = torch.tensor([record["input_ids"]])
    logits = model(input_ids=ids, use_cache=False).logits[0] / record["temperature"]
    mask = torch.tensor(record["loss_mask"][1:]).bool()
    new = torch.log_softmax(logits[:-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
    old, advantages = (torch.tensor(record[name])[1:] for name in ("logprobs", "advantage"))
    ratio = torch.where(mask, new - old, 0.0).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return torch.where(mask, loss, 0.0).sum() / documents


def gradients_of(given: dict[str, Any], stage: int) -> dict[str, torch.Tensor]:
    records, size = given["records"], given["micro_batch"]
    world, rank = dist.get_world_size(), dist.get_rank()
    own = records[rank * len(records) // world : (rank + 1) * len(records) // world]
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32).eval()
    config = {
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": len(own) // size,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    model.get_input_embeddings().padding_idx = None  # its row learns like any other
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config)
    for start in range(0, len(own), size):
        if start:
            engine.step()  # between micro-batches: nothing is updated
        loss = sum(document_loss(engine, record, len(records)) for record in own[start : start + size])
        engine.backward(loss)
    found = {name: safe_get_full_grad(weight).clone() for name, weight in engine.module.named_parameters()}
    engine.step()
    return found


def main(given: str, made: str) -> None:
    # Else DeepSpeed compiles an extension that goes around gloo, which takes minutes on a busy machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    cases = torch.load(given, weights_only=True)
    results = [gradients_of(case, stage) for case in cases for stage in case["stages"]]
    if dist.get_rank() == 0:
        torch.save(results, made)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
