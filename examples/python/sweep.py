"""Train with several learning rates, one after another, and write a page that compares the runs."""

from task import arguments, make_config

from truestep import train, write_report

if __name__ == "__main__":
    given = arguments(__doc__)
    base = make_config(given, "sweep")
    runs = {}
    for rate in (5e-4, 2e-3, 8e-3):
        # Changed options are checked as those of a file are.
        config = base.changed(
            {
                "optimizer.learning_rate": rate,
                "checkpoint.directory": given.directory / "sweep" / f"{rate:g}",
                "logging.console": False,
            }
        )
        runs[rate] = train(config)
        print(f"learning rate {rate:g}: reward {runs[rate].evaluations()[-1]['greedy_reward']:.3f} held out")
    page = write_report([run.directory for run in runs.values()], given.directory / "sweep.html")
    print(f"compared in {page}")
