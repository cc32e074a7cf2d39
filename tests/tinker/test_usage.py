"""Quotas by key, which cost their tenant alone, and metrics, which name no key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinker.house import House, request_of, served_in, tenant_of
from truestep.commands.tinker import serving
from truestep.commands.tinker.tenants import Tenants, TenantsError
from truestep.commands.tinker.usage import Budget, Counts, Quota, exposition, summed

KEYS = """# tenants
alice tml-alice-0123456789 tokens_per_minute=600 requests=3 models=2 bytes=20_000_000
bob tml-bob-0123456789==
metrics tml-metrics-0123456789
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> House:
    folder = tmp_path_factory.mktemp("usage")
    (folder / "keys").write_text(KEYS)
    return served_in(folder, folder / "checkpoints", folder / "keys")


@pytest.fixture
def house(served: House) -> Iterator[House]:
    house = served.of("tml-alice-0123456789")
    house.make()
    yield house
    house.get(f"sessions/{house.session}/finish", "POST")
    house.work()


def metrics(house: House) -> dict[str, float]:
    key = {"authorization": "Bearer tml-metrics-0123456789"}
    text = house.client.get("/metrics", headers=key).text
    assert "tml-" not in text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'truestep_[a-z_]+(\{tenant="[^"]+"\})? [-+0-9.e]+', line) for line in lines), text
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def passed(house: House, seq: int, data: int = 1, model: int = 0) -> bytes:
    given = [([3, 4, 5, 6], {"target_tokens": [4, 5, 6, 7]})] * data
    return request_of(f"{house.session}:train:{model}", seq, given, "cross_entropy")


def test_tokens_of_a_minute(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    own = house.tinker.state._of_tenant("alice")
    monkeypatch.setattr(own, "budget", Budget(600, lambda: clock[0]))
    assert house.post("forward_backward", content=passed(house, 1, data=180)).status_code == 200  # 900 of 600
    refused = house.post("forward_backward", content=passed(house, 2))
    assert refused.status_code == 429 and refused.headers["retry-after"] == "31"
    assert "600 tokens of this minute" in refused.json()["error"]
    assert "metrics" in house.result(house.recorded("optim_step", seq_id=2)), "an update has no tokens"
    assert house.send("sample", **house.recorded("base_sampler")).status_code == 429
    bob = house.of("tml-bob-0123456789==")
    bob.make()
    assert bob.post("forward_backward", content=passed(bob, 1, data=180)).status_code == 200
    clock[0] = 31.0
    assert house.post("forward_backward", content=passed(house, 3)).status_code == 200
    house.work()
    bob.get(f"sessions/{bob.session}/finish", "POST")


def test_what_a_request_may_draw_is_taken_and_given_back(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    own = house.tinker.state._of_tenant("alice")
    monkeypatch.setattr(own, "budget", Budget(600, lambda: clock[0]))
    sampler = house.recorded("base_sampler")

    def draws(seq: int, count: int) -> Any:
        how = {"max_tokens": 50, "stop": []}
        return house.send("sample", **sampler, seq_id=seq, num_samples=count, sampling_params=how)

    whole = draws(0, 12)
    assert whole.status_code == 200 and own.budget.left < 0
    refused = draws(1, 1)
    assert refused.status_code == 429 and 0 < int(refused.headers["retry-after"]) < 300, "before any token is drawn"
    house.result(whole.json())
    used = metrics(house)['truestep_sampled_tokens_total{tenant="alice"}']
    assert own.jobs[whole.json()["request_id"]].drawn <= used
    prompt = own.jobs[whole.json()["request_id"]].tokens
    assert own.budget.left == 600 - prompt - own.jobs[whole.json()["request_id"]].drawn
    own.budget.left = 600.0
    cancelled = draws(2, 12).json()
    house.post("cancel_future", {"request_id": cancelled["request_id"]})
    assert own.budget.left == 600 - prompt, "nothing was drawn"


def test_what_no_quota_ever_allows_is_refused_by_name(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house.tinker.state._of_tenant("alice"), "budget", Budget(10, lambda: 0.0))
    sampler = house.recorded("base_sampler")
    refused = house.send("sample", **sampler, num_samples=2, sampling_params={"max_tokens": 30, "stop": []})
    assert refused.status_code == 400 and "allows 40 for one" in refused.json()["error"]
    failed = house.result(house.post("forward_backward", content=passed(house, 1, data=9)).json())
    assert "allows 40 for one" in failed["error"] and failed["category"] == "user"
    assert "a forward_backward of this step failed" in house.result(house.recorded("optim_step", seq_id=2))["error"]
    assert house.post("forward_backward", content=passed(house, 3, data=8)).status_code == 200


def test_a_budget_is_that_of_a_minute() -> None:
    clock = [0.0]
    budget = Budget(60, lambda: clock[0])
    used = 0
    for second in range(600):
        clock[0] = float(second)
        while not budget.wait():
            budget.use(7)
            used += 7
    assert 60 + 599 <= used <= 60 + 599 + 7
    assert Budget(None).wait() == 0.0


def test_requests_at_a_time_and_models(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house.tinker.state._of_tenant("alice"), "budget", Budget(None))
    assert house.recorded("model", model_seq_id=1)
    house.work()
    assert "2 models of yours" in house.send("model", model_seq_id=2).json()["error"]
    answers = [house.post("forward_backward", content=passed(house, seq)) for seq in (1, 2, 3, 4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[-1].headers["retry-after"] == "1"
    again = house.post("forward_backward", content=passed(house, 3))
    assert again.json() == answers[2].json(), "one that is known is no new one"
    house.work()
    assert house.post("forward_backward", content=passed(house, 4)).status_code == 200


def test_bytes_of_checkpoints(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    state = house.tinker.state
    monkeypatch.setattr(state, "quota", lambda tenant: Quota(bytes=state.live_bytes(tenant) + 5000))
    first = house.result(house.recorded("save", seq_id=1, path="one"))["path"]
    assert "is your quota: remove some" in house.result(house.recorded("save", seq_id=2, path="two"))["error"]
    assert house.get(f"training_runs/{house.session}:train:0/checkpoints/weights/one", "DELETE").status_code == 200
    assert first.endswith("one") and "path" in house.result(house.recorded("save", seq_id=3, path="two"))
    house.clear()
    assert "sampling_session_id" in house.result(house.recorded("sampler", seq_id=4))
    refused = house.result(house.recorded("sampler", seq_id=5, sampling_session_seq_id=1))
    assert "samplers without names" in refused["error"]
    house.clear()
    live = state.live_bytes("alice")
    monkeypatch.setattr(state, "quota", lambda tenant: Quota(bytes=live + 1000))
    for seq in range(6, 16):
        house.result(house.post("forward_backward", content=passed(house, seq)).json())
    assert state.live_bytes("alice") > live + 1000 and state.live_bytes("bob") == 0
    assert "is your quota" in house.result(house.recorded("save", seq_id=16, path="two"))["error"]


def test_metrics_count_what_was_done(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house.tinker.state._of_tenant("alice"), "budget", Budget(None))
    before = metrics(house)
    promise = house.post("forward_backward", content=passed(house, 1, data=3)).json()
    assert metrics(house)["truestep_queue"] == 1 == metrics(house)['truestep_requests_waiting{tenant="alice"}']
    house.result(promise)
    house.result(house.recorded("optim_step", seq_id=2))
    house.result(house.recorded("save", seq_id=3, path="../x"))
    sampler = house.recorded("base_sampler")
    house.result(house.recorded("sample", **sampler, sampling_params={"max_tokens": 3, "stop": []}))
    found = metrics(house)
    grown = {name: found[name] - before.get(name, 0) for name in found}
    expected = {"requests": 4, "failed": 1, "refused": 0, "steps": 1, "trained_tokens": 15, "sampled_tokens": 6}
    for name, count in expected.items():
        assert grown[f'truestep_{name}_total{{tenant="alice"}}'] == count, name
    assert grown["truestep_busy_seconds_total"] > 0 and found["truestep_resident_memory_bytes"] > 2**20
    assert (found["truestep_sessions"], found["truestep_models"]) == (before["truestep_sessions"], 1)


def test_who_reads_metrics(house: House, tmp_path: Path) -> None:
    for key in ("tml-alice-0123456789", "tml-bob-0123456789==", "tml-other", ""):
        assert house.client.get("/metrics", headers={"x-api-key": key}).status_code == 401
    assert house.of("tml-metrics-0123456789").send("session").status_code == 401, "and it is no tenant"
    tenants = Tenants(None)
    tenants.check_metrics(None)
    assert "tml-alice" not in tenant_of("tml-alice")


def test_what_the_terminal_shows(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    tinker = house.tinker
    monkeypatch.setattr(tinker, "say", said.append)
    monkeypatch.setattr(house.tinker.state._of_tenant("alice"), "budget", Budget(None))
    _, counts, _ = tinker.state.used()
    monkeypatch.setattr(tinker, "_said", summed(counts))
    house.result(house.post("forward_backward", content=passed(house, 1, data=60)).json())
    clock = tinker._looked
    monkeypatch.setattr(tinker, "now", lambda: clock + serving._LOOK_SECONDS)
    house.work()
    monkeypatch.setattr(tinker, "now", lambda: clock + 2 * serving._LOOK_SECONDS)
    house.work()
    (line,) = said
    assert "1 models, 0 requests wait, 10 tokens/s trained, 0 tokens/s sampled, 0 steps" in line
    assert summed({"a": Counts(1, 2), "b": Counts(3, 4)}) == Counts(4, 6)


def test_quotas_that_have_no_meaning(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(KEYS)
    assert Tenants(file).quota("alice") == Quota(600, 3, 2, 20_000_000) and Tenants(file).quota("bob") == Quota()
    for line, problem in (
        ("speed=3", "speed is unknown"), ("models=0", "1 or more"), ("models=x", "models=x is no quota"),
        ("models=_", "models=_ is no quota"), ("models=500k", "models=500k is no quota"), ("models", "is no quota"),
        ("models=1 models=5", "models is given twice"),
    ):  # fmt: skip
        file.write_text(f"alice tml-alice-0123456789 {line}")
        with pytest.raises(TenantsError, match=problem):
            Tenants(file)
    file.write_text("metrics tml-metrics-0123456789 models=3")
    with pytest.raises(TenantsError, match="has no quota"):
        Tenants(file)


def test_numbers_of_metrics_have_all_their_digits() -> None:
    lines = exposition({"sessions": 1234567.0}, {}, {}, 0.0).splitlines()
    assert float(next(line.split()[1] for line in lines if line.startswith("truestep_sessions "))) == 1234567.0


def test_the_page_s_file_of_keys(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text(encoding="utf-8")
    (tmp_path / "keys").write_text(page.split("```text\n")[1].split("```")[0])
    tenants = Tenants(tmp_path / "keys")
    assert tenants.quota("alice") == Quota(500_000, 64, 4, 20_000_000_000) and tenants.quota("bob") == Quota()
    tenants.check_metrics("tml-a71hgw3np6ys")
