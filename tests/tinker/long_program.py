"""What a user of the client writes, over a server that may be killed: trains, saves and samples, and prints what it was
told, a line of JSON for each step. Runs where the package tinker is; imports nothing of ours."""

import json
import sys

import numpy as np

import tinker
from tinker import types


def main():
    client = tinker.ServiceClient().create_lora_training_client(base_model=sys.argv[1], rank=4, seed=1).result()
    draw = types.SamplingParams(max_tokens=4, temperature=0.7, seed=3)
    for step in range(int(sys.argv[2])):
        inputs = {"target_tokens": np.array([4, 5, 6]), "weights": np.array([1.0, 0.5, step / 8], np.float32)}
        datum = types.Datum(model_input=types.ModelInput.from_ints([3, 4, 5]), loss_fn_inputs=inputs)
        passed = client.forward_backward([datum], "cross_entropy")
        updated = client.optim_step(types.AdamParams(learning_rate=0.01))
        told = [passed.result().metrics["loss:sum"], updated.result().metrics["grad_norm"]]
        if step % 2:
            sampler = client.save_weights_and_get_sampling_client()
            drawn = sampler.sample(types.ModelInput.from_ints([3, 4]), num_samples=2, sampling_params=draw).result()
            told += [[one.tokens, one.logprobs] for one in drawn.sequences]
        if step % 3 == 2:
            client.save_state(f"step-{step}").result()
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
