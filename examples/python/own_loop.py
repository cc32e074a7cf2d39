"""GRPO as a loop of one's own: sample, rate, compute the gradient, update. It is what `train` does, bit for bit."""

from task import arguments, make_config, reward, tasks

from truestep import Session

if __name__ == "__main__":
    given = arguments(__doc__)
    config = make_config(given, "own-loop")
    prompts = tasks(given)
    with Session(config) as session:
        for step in range(given.steps):
            some = [prompts[number % len(prompts)] for number in range(4 * step, 4 * step + 4)]
            records = []
            for task, samples in zip(some, session.sample([task["prompt"] for task in some], count=8), strict=True):
                for sample in samples:
                    rated = reward(task["prompt"], sample.text, answer=task["answer"])
                    records.append(sample.record(reward=rated, group_id=task["prompt"]))
            session.forward_backward(records, totals=session.totals(records))
            made = session.step()
            print(f"step {made['step']}: reward {made['reward']:.3f}, gradient {made['grad_norm']:.3g}")
        checkpoint = session.save(given.directory / "own-loop")
        print(f"saved: {checkpoint}")
