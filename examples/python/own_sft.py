"""Supervised training on answers that somebody wrote, by calls of one's own."""

from task import arguments, make_config, tasks, written

from truestep import Session

SUPERVISED = {"type": "cross_entropy", "normalize_by": "labels"}


def train(session: Session, prompts: list[dict[str, object]], steps: int, learning_rate: float | None = None) -> float:
    """Train on eight answers a step. Return the last loss."""
    loss = 0.0
    for step in range(steps):
        some = [prompts[number % len(prompts)] for number in range(8 * step, 8 * step + 8)]
        session.forward_backward([written(session, task, int(str(task["answer"]))) for task in some], SUPERVISED)
        loss = session.step(learning_rate)["loss"]
    return loss


if __name__ == "__main__":
    given = arguments(__doc__)
    with Session(make_config(given, "own-sft")) as session:
        loss = train(session, tasks(given), given.steps)
        print(f"loss {loss:.3f} after {session.steps} steps")
