"""Distillation on the student's own samples: how much likelier the teacher finds a token is its advantage."""

from typing import Any

from own_sft import train
from task import arguments, make_config, tasks

from truestep import Session

REVERSE_KL = {"type": "reinforce", "normalize_by": "labels"}


def compared(records: list[dict[str, Any]], teacher: Session) -> tuple[list[dict[str, Any]], float]:
    """Give each token its advantage. Return also the mean divergence of the student from the teacher."""
    made, total, count = [], 0.0, 0
    for record, logprobs in zip(records, teacher.logprobs(records), strict=True):
        gaps = [float(theirs) - own for theirs, own in zip(logprobs, record["logprobs"], strict=True)]
        made.append({**record, "advantage": gaps})
        total, count = total - sum(gaps), count + len(gaps)
    return made, total / count


if __name__ == "__main__":
    given = arguments(__doc__)
    config = make_config(given, "own-distillation")
    prompts = tasks(given)
    with Session(config) as student, Session(config) as teacher:
        train(teacher, prompts, 2 * given.steps)
        for step in range(given.steps):
            some = [prompts[number % len(prompts)]["prompt"] for number in range(8 * step, 8 * step + 8)]
            records = [one.record() for samples in student.sample(some, count=4) for one in samples]
            records, apart = compared(records, teacher)
            student.forward_backward(records, REVERSE_KL)
            student.step()
            print(f"step {student.steps}: {apart:.3f} nats a token from the teacher")
        print(f"saved: {student.save(given.directory / 'own-distillation')}")
