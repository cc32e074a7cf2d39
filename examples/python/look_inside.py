"""Look before and after: the memory that is planned, what is in rollout files, a step's numbers, an exported model."""

import json

from own_source import rollouts
from task import arguments, make_config

from truestep import Config, check_files, export, plan, score, train

if __name__ == "__main__":
    given = arguments(__doc__)
    file = given.directory / "rollouts.jsonl"
    sampled = make_config(given, "look-inside")
    file.write_text("".join(json.dumps(record) + "\n" for record in rollouts(0, count=64)), encoding="utf-8")

    found = check_files(str(file))
    print(f"{found.documents} documents in {found.groups} groups, {found.rejected} records rejected")

    config = Config(
        model=sampled.model,
        data={"path": file, "group_size": 4, "tokens_per_microbatch": 512},
        schedule={"docs_per_step": 32},
        checkpoint={"directory": given.directory / "look-inside"},
        logging={"console": False},
    )
    print(f"planned: {plan(config).peak / 2**20:.1f} MiB at the peak of a step")

    scores = score(config, given.directory / "scores", gradients=True)
    ratios = [ratio for document in scores.documents for ratio in document["ratio"]]
    print(f"loss {scores.step['loss']:+.4f}, gradient {scores.step['grad_norm']:.4f}")
    print(f"importance ratios from {min(ratios):.3f} to {max(ratios):.3f}")

    result = train(config)
    exported = given.directory / "exported"
    if not exported.exists():
        export(result.directory, exported)
    print(f"{result.ended}; a Hugging Face directory: {exported}")
