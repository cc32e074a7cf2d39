"""Direct preference optimisation (Rafailov et al., 2023) on pairs.jsonl. Run it in this directory: python train.py"""

import json
import random
from pathlib import Path

from torch.nn.functional import logsigmoid

from truestep import Session

BETA = 0.1  # how strongly the policy is held to the model that it began as


def read(name):
    """Return the two chats of each pair, the better one first."""
    pairs = [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]
    return [
        [chat(f"{name}-{number}-{kind}", pair["prompt"], pair[kind]) for kind in ("chosen", "rejected")]
        for number, pair in enumerate(pairs)
    ]


def chat(name, prompt, answer):
    return {"id": name, "messages": [*prompt, {"role": "assistant", "content": answer}]}


def flat(pairs):
    return [record for pair in pairs for record in pair]


def sums(session, records):
    """Return the log-probability of each answer."""
    return {record["id"]: float(one.sum()) for record, one in zip(records, session.logprobs(records), strict=True)}


def preferred(own, first, pairs):
    """Return the share of pairs of which the policy prefers the better answer more than the first model did."""
    gains = [[own[record["id"]] - first[record["id"]] for record in pair] for pair in pairs]
    return sum(better > worse for better, worse in gains) / len(gains)


def main():
    pairs, held_out, run = read("pairs.jsonl"), read("held_out.jsonl"), Path("run")
    if run.exists():
        raise SystemExit(f"{run} exists, and this program does not go on from it: remove it, or give it another name")
    run.mkdir()
    with Session("config.yaml") as session, (run / "metrics.jsonl").open("w", encoding="utf-8") as metrics:
        steps, pairs_per_step = session.config.schedule.steps, session.config.schedule.docs_per_step // 2
        first = sums(session, flat([*pairs, *held_out]))

        def dpo(logprobs, documents):
            """Return the loss of the log-probs of each answer; of a pair the better one is first."""
            gains = [own.sum() - first[document.id] for own, document in zip(logprobs, documents, strict=True)]
            terms = [logsigmoid(BETA * (a - b)) for a, b in zip(gains[::2], gains[1::2], strict=True)]
            return -sum(terms) / len(terms)

        order = random.Random(0)
        for step in range(1, steps + 1):
            session.forward_backward(flat(order.sample(pairs, pairs_per_step)), dpo)
            line = {"step": step, **session.step(), "documents_seen": session.documents_seen}
            if step % 10 == 0 or step == steps:
                line["held_out_preferred"] = preferred(sums(session, flat(held_out)), first, held_out)
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
            print(f"step {step}/{steps}  loss {line['loss']:.4f}  preferred {line.get('held_out_preferred', '')}")
        session.export(run / "trained")


if __name__ == "__main__":
    main()
