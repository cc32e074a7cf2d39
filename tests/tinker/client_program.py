"""What a user of the client writes: trains, samples, saves and loads, and prints what it saw as JSON. Runs where the
package tinker is; imports nothing of ours."""

import json
import sys

import numpy as np

import tinker
from tinker import types

IDS = [3, 4, 5, 6, 7]
NEXT = [4, 5, 6, 7, 8]
RL = {"logprobs": [-4, -5, -4.5, -4, -3.5], "advantages": [0, 1, -1, 0.5, 2]}
LOSSES = {
    "cross_entropy": ({"weights": [0, 1, 1, 0.5, 1]}, {}),
    "importance_sampling": (RL, {}),
    "ppo": (RL, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}),
    "cispo": (RL, {}),
    "dro": (RL, {"beta": 0.1}),
    "gspo": ({**RL, "sequence_ratio_mask": [0, 1, 1, 1, 1]}, {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
}
ADAM = {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.9, "eps": 0.5, "weight_decay": 0.1, "grad_clip_norm": 2.0}


def datum(targets, **inputs):
    given = {"target_tokens": np.array(targets), **{name: np.array(v, np.float32) for name, v in inputs.items()}}
    return types.Datum(model_input=types.ModelInput.from_ints(IDS), loss_fn_inputs=given)


def resolved(value):
    return value.result() if hasattr(value, "result") else value


def square(data, logprobs):
    loss = sum((one**2).sum() for one in logprobs)
    return loss, {"squares": float(loss.detach())}


def main():
    seen = {"losses": {}}
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=sys.argv[1], rank=4, seed=1).result()
    seen["begin"] = client.save_state("begin").result().path
    for name, (inputs, numbers) in LOSSES.items():
        output = client.forward_backward([datum(NEXT, **inputs)], name, numbers or None).result()
        made = client.optim_step(types.AdamParams(**ADAM)).result()
        logprobs = output.loss_fn_outputs[0]["logprobs"].tolist()
        seen["losses"][name] = [logprobs, output.metrics["loss:sum"], made.metrics["grad_norm"]]
    custom = client.forward_backward_custom([datum(NEXT)], square).result()
    made = client.optim_step(types.AdamParams(**ADAM)).result()
    seen["custom"] = [custom.metrics["squares"], custom.metrics["loss:sum"], made.metrics["grad_norm"]]
    seen["end"] = client.save_state("end", ttl_seconds=3600).result().path
    sampler = resolved(client.save_weights_and_get_sampling_client())
    prompt = types.ModelInput.from_ints([3, 4, 5])
    seen["prompt"] = sampler.compute_logprobs(prompt).result()
    params = types.SamplingParams(max_tokens=6, temperature=0.7, seed=7)
    drawn = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params, topk_sample_logprobs=2).result()
    seen["samples"] = [[one.tokens, one.logprobs, one.stop_reason, one.topk_logprobs] for one in drawn.sequences]
    again = resolved(service.create_training_client_from_state_with_optimizer(seen["end"]))
    data = [datum(NEXT, weights=[1] * 5)]
    seen["same"] = [one.forward(data, "cross_entropy").result().metrics["loss:sum"] for one in (client, again)]
    for loss, given in (("cross_entropy", [datum([99999] * 5, weights=[1] * 5)]), ("stable_reinforce", data)):
        try:
            client.forward_backward(given, loss).result()
        except tinker.RequestFailedError as error:
            seen[f"refused {loss}"] = str(error)
    seen["after"] = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
    seen["removed"] = client.save_weights_for_sampler("removed").result().path
    rest = tinker.RestClient()
    seen["listed"] = [one.tinker_path for one in rest.list_checkpoints(client.model_id).result().checkpoints]
    rest.delete_checkpoint_from_tinker_path(seen["removed"]).result()
    seen["left"] = [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints]
    seen["capabilities"] = rest.get_server_capabilities().result().supported_models[0].model_name
    service.close("success").result()
    print(json.dumps(seen))


main()
