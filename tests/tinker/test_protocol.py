"""What the Tinker client sends, word for word, and what it gets: numbers by its definitions, futures, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import read_weights
from tinker.house import House, arrays_of, metrics_of, request_of, tenant_of
from tinker.oracle import Adapted, loss_of
from truestep.commands.tinker import wire

IDS = [3, 4, 5, 6, 7]
RL: dict[str, Any] = {"logprobs": [-4, -5, -4.5, -4, -3.5], "advantages": [0, 1, -1, 0.5, 2]}
NEXT = [4, 5, 6, 7, 8]
# What the recorded requests hold.
DATA: dict[str, list[tuple[list[int], list[Any], dict[str, Any]]]] = {
    "cross_entropy": [(IDS, [0, 5, 6, 7, 8], {"weights": [0, 1, 1, 0.5, 1]}), ([9, 2], [2, 7], {"weights": [1, 2]})],
    "importance_sampling": [(IDS, NEXT, RL)],
    "ppo": [(IDS, NEXT, RL)],
    "cispo": [(IDS, NEXT, RL)],
    "dro": [(IDS, NEXT, RL)],
    "gspo": [
        (IDS, NEXT, {**RL, "sequence_ratio_mask": [0, 1, 1, 1, 1]}),
        ([9, 2], [2, 7], {"logprobs": [-4, -4], "advantages": [1, -1], "sequence_ratio_mask": [1, 1]}),
    ],
}
NUMBERS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.1},
    "gspo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
}
ADAM = {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.9, "eps": 0.5, "weight_decay": 0.1, "grad_clip_norm": 2.0}


@pytest.fixture
def house(shared: House) -> Iterator[House]:
    house = shared.of("tml-alice")
    yield house
    if house.session:
        house.get(f"sessions/{house.session}/finish", "POST")
        house.work()
    house.clear()


def weights_at(house: House, path: str) -> dict[str, torch.Tensor]:
    _, directory = house.tinker._jobs._checkpoints.find(tenant_of(house.key), path)
    return {name: values for name, values in read_weights(directory).items() if ".lora_" in name}


def model_directory(house: House) -> Path:
    return Path(house.tinker._jobs._config.model.path)


@pytest.mark.parametrize("loss", DATA)
def test_losses_and_updates_are_the_client_s_definitions(loss: str, house: House) -> None:
    """Two updates with all of AdamW's options, so that gradients of both matrices are seen."""
    model = house.make()
    saved = house.result(house.recorded("save", seq_id=1, path="begin"))
    oracle = Adapted(model_directory(house), weights_at(house, saved["path"]))
    for step in range(2):
        message = house.message(loss, seq=2 + 2 * step)
        output = house.result(house.post("forward_backward", content=message).json())
        total = torch.zeros((), dtype=torch.float64)
        for (ids, targets, given), found in zip(DATA[loss], arrays_of(output), strict=True):
            own = oracle.logprobs(ids, targets)
            np.testing.assert_allclose(found["logprobs"], [float(one.detach()) for one in own], rtol=0, atol=1e-5)
            total = total + loss_of(loss, own, given, **NUMBERS.get(loss, {}))
        assert metrics_of(output)["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-5, abs=1e-5)
        norm = oracle.update(total, ADAM)
        made = house.result(house.recorded("optim_step", adam_params=ADAM, seq_id=3 + 2 * step))
        assert made["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    saved = house.result(house.recorded("save", seq_id=6, path="end"))
    assert saved["path"] == f"tinker://{model}/weights/end"
    for name, values in weights_at(house, saved["path"]).items():
        expected = oracle.matrices[name].detach()
        assert float((values - expected).norm()) <= 1e-5 * max(1.0, float(expected.norm())), name


@pytest.mark.parametrize("loss", ["ppo", "cispo", "dro", "gspo"])
def test_numbers_that_a_request_leaves_out(loss: str, house: House) -> None:
    """Each default decides: there are tokens on both sides of each threshold, and the loss differs without it."""
    model = house.make()
    saved = house.result(house.recorded("save", seq_id=1))
    own = Adapted(model_directory(house), weights_at(house, saved["path"])).logprobs(IDS, NEXT)
    far = [0.5, -0.5, 1.8, -0.0002, 0.0003] if loss != "gspo" else [0.01, 0.01, 0.01, 0.01, 0.01]
    defaults: dict[str, dict[str, float]] = {
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "dro": {"beta": 0.05},
        "gspo": {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004},
    }
    for seq, sign in ((2, 1), (3, -1)):
        logprobs = [float(one.detach()) - sign * gap for one, gap in zip(own, far, strict=True)]
        given: dict[str, Any] = {"logprobs": logprobs, "advantages": [sign * one for one in (2, -1, 1, 1, -1)]}
        if loss == "gspo":
            given |= {"sequence_ratio_mask": [1] * 5, "advantages": [sign * 2] * 5}
        body = request_of(model, seq, [(IDS, {"target_tokens": NEXT, **given})], loss)
        found = metrics_of(house.result(house.post("forward_backward", content=body).json()))["loss:sum"]
        assert found == pytest.approx(float(loss_of(loss, own, given, **defaults[loss]).detach()), rel=1e-5)
        for name, value in defaults[loss].items():
            other = float(loss_of(loss, own, given, **{**defaults[loss], name: 1.1 * value + 1e-9}).detach())
            if loss == "dro" or (loss != "cispo" and (sign > 0) == ("high" in name)):
                assert abs(other - found) > 1e-5 * abs(found), (name, sign)


def test_a_pass_in_parts_is_the_sum_of_its_parts(house: House) -> None:
    house.make()
    sizes = []
    for seq, parts in ((1, 1), (4, 2)):
        for part in range(parts):
            house.result(house.post("forward_backward", content=house.message("cross_entropy", seq=seq + part)).json())
        made = house.result(house.recorded("optim_step", seq_id=seq + parts, adam_params={"learning_rate": 0.0}))
        sizes.append(made["metrics"]["grad_norm"])
        if seq == 1:
            house.result(house.recorded("optim_step", seq_id=3))  # without a gradient: an error of its own
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=1e-5)


def test_several_targets_at_a_position(house: House) -> None:
    house.make()
    saved = house.result(house.recorded("save", seq_id=1))
    oracle = Adapted(model_directory(house), weights_at(house, saved["path"]))
    dense = [[5, 9], [6, 1], [7, 2], [8, 3], [1, 4]]
    for seq, name, targets, weights in (
        (2, "two_targets", dense, [[1, 0.5]] * 5),
        (3, "sparse_targets", [[5, 9], [0, 0], [0, 0], [0, 0], [0, 1]], [[1, 0.5], *([[0, 0]] * 3), [0, 2]]),
    ):
        output = house.result(house.post("forward_backward", content=house.message(name, seq=seq)).json())
        (found,) = arrays_of(output)
        own = oracle.logprobs(IDS, targets)
        expected = np.array([[float(one.detach()) for one in row] for row in own])
        np.testing.assert_allclose(found["logprobs"], expected, rtol=0, atol=1e-5)
        assert metrics_of(output)["loss:sum"] == pytest.approx(-float((expected * weights).sum()), rel=1e-5)


def test_forward_leaves_no_gradient(house: House) -> None:
    house.make()
    output = house.result(house.post("forward_backward", content=house.message("forward", seq=1)).json())
    assert arrays_of(output)[0]["logprobs"].shape == (5,)
    assert "there is no gradient" in house.result(house.recorded("optim_step", seq_id=2))["error"]


def test_samples_and_log_probs_of_prompts(house: House) -> None:
    model = house.make()
    house.result(house.post("forward_backward", content=house.message("cross_entropy", seq=1)).json())
    house.result(house.recorded("optim_step", seq_id=2))
    saved = house.result(house.recorded("save", seq_id=3))
    sampler = house.result(house.recorded("sampler", seq_id=4))["sampling_session_id"]
    assert house.get(f"samplers/{sampler}").json()["base_model"] == "model"
    raw = house.result(house.recorded("sample"))
    parts = list(wire.fields_of(raw))
    sequences = [dict(wire.fields_of(value)) for number, value in parts if number == 1]
    prompt = np.frombuffer(next(value for number, value in parts if number == 2), "<f4")
    oracle = Adapted(model_directory(house), weights_at(house, saved["path"]))
    assert np.isnan(prompt[0]) and len(sequences) == 2
    expected = oracle.logprobs([3, 4], [4, 5])
    np.testing.assert_allclose(prompt[1:], [float(one.detach()) for one in expected], rtol=0, atol=1e-5)
    for sequence in sequences:
        tokens = np.frombuffer(sequence[2], "<i4").tolist()
        ids = [3, 4, 5, *tokens]
        z = oracle._model.logits(ids, temperature=0.7)[2:-1].log_softmax(-1)
        own = [float(row[token].detach()) for row, token in zip(z, tokens, strict=True)]
        np.testing.assert_allclose(np.frombuffer(sequence[3], "<f4"), own, rtol=0, atol=1e-5)
        top = dict(wire.fields_of(sequence[4]))
        best = oracle._model.logits(ids)[2:-1].log_softmax(-1).topk(3)
        assert np.frombuffer(top[1], "<i4").tolist() == best.indices.flatten().tolist()
        np.testing.assert_allclose(np.frombuffer(top[2], "<f4"), best.values.flatten().detach(), rtol=0, atol=1e-5)
    # A retry has the same future; a sampler of these weights draws the same when the model has gone on.
    assert house.recorded("sample")["request_id"] == f"{house.session}:sample:0:0"
    house.result(house.post("forward_backward", content=house.message("cross_entropy", seq=5)).json())
    house.result(house.recorded("optim_step", seq_id=6))
    assert house.result(house.recorded("sample", seq_id=1)) == raw
    house.recorded("base_sampler")
    base = house.result(house.recorded("sample", sampling_session_id=f"{house.session}:sample:1"))
    assert base != raw and model in house.get("training_runs").text


def test_requests_of_a_model_are_computed_in_their_order(house: House) -> None:
    house.make()
    later = house.recorded("optim_step", seq_id=2)
    house.work()
    assert not house.tinker.state.future(tenant_of("tml-alice"), later["request_id"]).future.done()
    first = house.post("forward_backward", content=house.message("cross_entropy", seq=1)).json()
    again = house.post("forward_backward", content=house.message("cross_entropy", seq=1)).json()
    assert again == first, "a retry of a lost answer has the same future"
    assert house.result(later)["metrics"]["step"] == 1
    assert house.post("forward_backward", content=house.message("cross_entropy", seq=1)).json() == first
    assert house.result(first) == house.result(first), "a result may be asked for again"
    assert house.result(house.recorded("optim_step", seq_id=2))["metrics"]["step"] == 1, "and no step is made twice"


def test_a_bad_request_fails_by_itself(house: House) -> None:
    model = house.make()
    bad = [
        ([([3], {"target_tokens": [99]})], "cross_entropy", "outside of the vocabulary of 61"),
        ([([3], {"target_tokens": [4, 5]})], "cross_entropy", "have the shape [2] for 1 tokens"),
        ([([3] * 64, {"target_tokens": [3] * 64})], "cross_entropy", "64 tokens are more than 63"),
        ([([], {"target_tokens": []})], "cross_entropy", "has no tokens"),
        ([], "cross_entropy", "there are no data"),
        ([([3], {"target_tokens": [4], "weights": [np.nan]})], "cross_entropy", "not finite"),
        ([([3], {"target_tokens": [4], "advantages": [1]})], "cross_entropy", "has no advantages"),
        ([([3], {"target_tokens": [4], "advantages": [1]})], "ppo", "has no logprobs"),
        ([([3], {"target_tokens": [4]})], "nonsense", "'nonsense' is unknown"),
    ]
    seq = 0
    for data, loss, message in bad:
        seq += 1
        found = house.result(house.post("forward_backward", content=request_of(model, seq, data, loss)).json())
        assert message in found["error"] and found["category"] == "user"
    found = house.result(house.post("forward_backward", content=house.message("stable_reinforce", seq=seq + 1)).json())
    assert "its formula is not public" in found["error"]
    found = house.result(house.recorded("dimuon", seq_id=seq + 2))
    assert "dimuon" in found["error"] and "is not served here" in found["error"]
    good = house.result(house.post("forward_backward", content=house.message("spans", seq=seq + 3)).json())
    assert metrics_of(good).keys() == {"loss:sum"}
    assert "is not served here" in house.result(house.recorded("external", seq_id=seq + 4))["error"]


def test_checkpoints_are_listed_loaded_and_removed(house: House) -> None:
    model = house.make()
    house.result(house.post("forward_backward", content=house.message("cross_entropy", seq=1)).json())
    house.result(house.recorded("optim_step", seq_id=2))
    path = house.result(house.recorded("save"))["path"]
    assert "exists already" in house.result(house.recorded("save", seq_id=4))["error"]
    (listed,) = house.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
    assert (listed["tinker_path"], listed["checkpoint_type"]) == (path, "training") and listed["expires_at"]
    about = house.post("weights_info", {"tinker_path": path}).json()
    assert about["lora_rank"] == 4 and about["train_unembed"] is False, "though the client asks for it by default"
    weights = weights_at(house, path)
    assert len(weights) == 28 and not any("embed" in name or "lm_head" in name for name in weights)
    other = house.result(house.recorded("load"))["model_id"]
    outputs = []
    for name, seq in ((model, 5), (other, 1)):
        message = house.message("cross_entropy", seq=seq, model=name)
        outputs.append(house.result(house.post("forward_backward", content=message).json()))
        house.result(house.recorded("optim_step", seq_id=seq + 1, model_id=name))
        message = house.message("forward", seq=seq + 2, model=name)
        outputs.append(house.result(house.post("forward_backward", content=message).json()))
    assert outputs[:2] == outputs[2:], "with its optimizer's state, bit for bit"
    one = f"training_runs/{model}/checkpoints/weights/one"
    assert house.get(f"{one}/ttl", "PUT", json={"ttl_seconds": 5}).status_code == 400
    assert house.get(f"{one}/ttl", "PUT", json={"ttl_seconds": None}).status_code == 200
    assert house.get("checkpoints").json()["checkpoints"][0]["expires_at"] is None
    house.get(f"{one}/ttl", "PUT", json={"ttl_seconds": 4000})
    store = house.tinker._jobs._checkpoints
    now, store.now = store.now, lambda: now() + 4001
    try:
        assert house.get("checkpoints").json()["checkpoints"] == []
    finally:
        store.now = now
    assert house.send("load", model_seq_id=2).status_code == 404
    path = house.result(house.recorded("save", seq_id=8, path="again"))["path"]
    assert house.post("weights_info", {"tinker_path": path}).status_code == 200
    alias = path.replace(":train:", "_train_")
    assert house.post("weights_info", {"tinker_path": alias}).status_code == 404, "one name for each"


def test_a_server_that_begins_anew_has_the_checkpoints(house: House, tmp_path: Path) -> None:
    model = house.make()
    house.result(house.post("forward_backward", content=house.message("cross_entropy", seq=1)).json())
    house.result(house.recorded("optim_step", seq_id=2))
    path = house.result(house.recorded("save"))["path"]
    expected = house.result(house.post("forward_backward", content=house.message("forward", seq=4)).json())
    house.get(f"sessions/{house.session}/finish", "POST")
    again = house.started_again(model_directory(house).parent)
    again.begin()
    (run,) = again.get("training_runs").json()["training_runs"]
    assert run["training_run_id"] == model and run["last_checkpoint"]["tinker_path"] == path
    loaded = again.result(again.recorded("load", path=path, model_seq_id=0))["model_id"]
    message = again.message("forward", model=loaded)
    assert again.result(again.post("forward_backward", content=message).json()) == expected
    assert again.post("get_info", {"model_id": model}).status_code == 404, "the model itself is gone"


def test_no_tenant_sees_another_s(house: House) -> None:
    model = house.make()
    job = house.post("forward_backward", content=house.message("cross_entropy", seq=1)).json()
    house.work()
    path = house.result(house.recorded("save", seq_id=2))["path"]
    mallory = house.of("tml-mallory")
    mallory.begin()
    asks = [
        mallory.post("retrieve_future", {"request_id": job["request_id"]}),
        mallory.post("forward_backward", content=mallory.message("cross_entropy", seq=3, model=model)),
        mallory.post("get_info", {"model_id": model}),
        mallory.post("session_heartbeat", {"session_id": house.session}),
        mallory.post("weights_info", {"tinker_path": path}),
        mallory.send("load", path=path),
        mallory.send("optim_step", model_id=model),
        mallory.send("base_sampler", session_id=house.session),
        mallory.get(f"sessions/{house.session}"),
        mallory.get(f"sessions/{house.session}/finish", "POST"),
        mallory.get(f"training_runs/{model}"),
        mallory.get(f"training_runs/{model}/checkpoints"),
        mallory.get(f"training_runs/{model}/checkpoints/weights/one", "DELETE"),
    ]
    unknown = mallory.post("get_info", {"model_id": "nothing"})
    assert [answer.status_code for answer in asks] == [404] * len(asks)
    assert unknown.json() == asks[2].json(), "it looks as what is not there"
    assert mallory.get("checkpoints").json()["checkpoints"] == []
    assert mallory.get("training_runs").json()["training_runs"] == []
    assert house.of("").post("client/config", {}).status_code == 401


def test_a_session_that_ends_frees_its_models(house: House) -> None:
    house.make()
    house.result(house.recorded("sampler", seq_id=1))
    waiting = house.recorded("optim_step", seq_id=2)
    assert house.tinker._jobs._sessions
    assert house.get(f"sessions/{house.session}/finish", "POST").status_code == 200
    house.work()
    assert not house.tinker._jobs._sessions and not house.tinker.state.models
    assert house.post("session_heartbeat", {"session_id": house.session}).status_code == 410
    assert house.post("retrieve_future", {"request_id": waiting["request_id"]}).status_code == 404
    folder = house.tinker._jobs._checkpoints._of(tenant_of("tml-alice"))
    assert not list(folder.rglob("unnamed-*")), "samplers without names end with their session"


def test_a_result_that_is_not_there_yet_says_how_it_stands(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.begin()
    promise = house.recorded("model")
    monkeypatch.setattr("truestep.commands.tinker.app.asyncio.wait", _at_once)
    answer = house.post("retrieve_future", {"request_id": promise["request_id"], "allow_metadata_only": True})
    assert answer.status_code == 408 and answer.json()["queue_state"] == "active"
    monkeypatch.undo()
    assert house.result(promise)["type"] == "create_model"


async def _at_once(futures: list[Any], timeout: float) -> tuple[set[Any], set[Any]]:
    return {one for one in futures if one.done()}, {one for one in futures if not one.done()}
