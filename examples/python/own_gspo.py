"""GSPO in two calls a step, over groups whose rewards differ: others are looked at, and sampled again with the next."""

from typing import Any

from task import arguments, make_config, reward, tasks

from truestep import Session

GSPO = {"type": "gspo", "epsilon_low": 3e-4, "epsilon_high": 4e-4, "normalize_by": "document_means"}


def group(session: Session, task: dict[str, Any]) -> list[dict[str, Any]]:
    """Sample a group and rate it. It is empty if all rewards are equal: then there is nothing to learn from."""
    samples = session.sample([task["prompt"]], count=8)[0]
    rewards = [reward(task["prompt"], one.text, answer=task["answer"]) for one in samples]
    if len(set(rewards)) == 1:
        return []
    return [one.record(reward=each, group_id=task["prompt"]) for one, each in zip(samples, rewards, strict=True)]


if __name__ == "__main__":
    given = arguments(__doc__)
    with Session(make_config(given, "own-gspo")) as session:
        prompts = iter(tasks(given))
        for _ in range(given.steps):
            groups: list[list[dict[str, Any]]] = []
            while len(groups) < 4 and (task := next(prompts, None)) is not None:
                groups += [made for made in [group(session, task)] if made]
            for half in (groups[:2], groups[2:]):  # how a step is cut into calls changes no result
                if half:
                    session.forward_backward([record for one in half for record in one], GSPO)
            if not groups:
                break
            made = session.step()
            print(f"step {made['step']}: reward {made['reward']:.3f}, {made['num_documents']} documents")
        print(f"saved: {session.save(given.directory / 'own-gspo')}")
