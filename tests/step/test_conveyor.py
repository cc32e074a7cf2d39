"""What lies on the host moves beside the passes: numbers are the same, and no more memory is taken than without.

A device is stood for whose copies are made as late as they may be. What is not there yet is NaN, on both sides.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import latest, read_states, read_weights
from small_runs import file_config, merged, quiet_trainer, write_rollouts
from truestep.config.schema import Config
from truestep.gpu import marks
from truestep.run.checkpoint.saves import SaveError
from truestep.step.update.optimizers import conveyor
from truestep.step.update.optimizers.by_weight import ByWeight
from truestep.step.update.optimizers.conveyor import Conveyor, Tensors


class LateLanes:
    """The ways to a device: copies to it are made when it waits for them, copies to the host when that waits, or now
    and then by themselves. Its memory holds loads, and what the passes of a run take."""

    def __init__(self, draw: random.Random | None = None):
        self.draw = draw
        self.taken = 0  # by passes
        self.most = 0  # that was ever in use
        self.coming: dict[int, tuple[Sequence[Tensors], list[Tensors]]] = {}
        self.going: dict[int, tuple[Sequence[Tensors], list[Tensors], list[Tensors]]] = {}
        self.here: list[tuple[int, list[Tensors]]] = []
        self.fetches = self.waits = 0
        self.size = 10**9

    def holds(self) -> int:
        return self.size

    def fetch(self, load: Sequence[Tensors]) -> tuple[list[Tensors], Any]:
        before = [{kind: value.clone() for kind, value in tensors.items()} for tensors in load]
        copies = [{kind: _spoilt(value) for kind, value in tensors.items()} for tensors in load]
        self.fetches += 1
        self.coming[self.fetches] = load, before
        self.here.append((self.fetches, copies))
        self.most = max(self.most, self.used())
        return copies, self.fetches

    def arrive(self, event: int) -> None:
        load, before = self.coming.pop(event)
        copies = next(copies for number, copies in self.here if number == event)
        for tensors, kept, copy in zip(load, before, copies, strict=True):
            for kind, value in tensors.items():
                assert _same(value, kept[kind]), "it changed on the host while it was on its way"
                copy[kind].copy_(value)

    def send(self, host: Sequence[Tensors], copies: Sequence[Tensors]) -> Any:
        values = [{kind: value.clone() for kind, value in tensors.items()} for tensors in copies]
        for tensors in host:
            for value in tensors.values():
                _spoil(value)
        number = next(number for number, own in self.here if own is copies)
        self.going[number] = host, list(copies), values
        return number

    def is_back(self, event: int) -> bool:
        if self.draw is not None and self.draw.random() < 0.2:
            self._bring(event)
        return event not in self.going

    def wait(self, event: int) -> None:
        self.waits += 1
        if event in self.coming:
            self.arrive(event)
        self._bring(event)
        self._free(event)

    def _bring(self, event: int) -> None:
        if event in self.going:
            host, _, values = self.going.pop(event)
            for tensors, value in zip(host, values, strict=True):
                for kind, target in tensors.items():
                    target.copy_(value[kind])
            self._free(event)

    def _free(self, event: int) -> None:
        self.here = [(number, copies) for number, copies in self.here if number != event]

    def used(self) -> int:
        return self.taken + sum(conveyor._size(copies) for _, copies in self.here)


def _spoil(value: torch.Tensor) -> None:
    value.fill_(math.nan if value.is_floating_point() else 77)


def _spoilt(value: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(value)
    _spoil(copy)
    return copy


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def by_hand(lanes: LateLanes) -> Conveyor:
    made = Conveyor(torch.device("cpu"))
    made._lanes = lanes
    return made


def loads_of(count: int, size: int = 100) -> list[Sequence[Tensors]]:
    return [[{"value": torch.full((size,), float(number))}] for number in range(count)]


def leave_room(moving: Conveyor, lanes: LateLanes, room: int) -> None:
    """End a layer with so much in use, and free it."""
    lanes.taken = room
    moving.layer_ended()
    lanes.taken = 0


class Moves:
    """Counts the loads that came before each update, and those that were still on their way back behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.ahead, self.going, honest = list[int](), list[int](), Conveyor.run

        def run(moving: Conveyor, loads: Any) -> None:
            self.ahead.append(len(moving._ahead))
            honest(moving, loads)
            self.going.append(len(moving._going))

        monkeypatch.setattr(Conveyor, "run", run)


def add(copies: Sequence[Tensors]) -> None:
    copies[0]["value"] += 1


@pytest.mark.parametrize("weights", [0, 20_000])
def test_loads_come_in_the_last_backward_pass_and_go_back_in_the_next_forward_pass(weights: int) -> None:
    """Layers take 1,000 bytes each, loads 400, beside what is always in use."""
    lanes = LateLanes()
    moving, loads = by_hand(lanes), loads_of(6)
    lanes.taken = weights
    for step in range(2):
        for taken in (1000, 2000, 3000, 2000, 1000, 0):  # a step's layers, forward and back
            lanes.taken = weights + taken
            moving.layer_ended()
        moving.run((load, add) for load in loads)
        # In the first step nobody knows what the first layer takes: all 2,400 bytes fit what others have taken.
        assert len(lanes.going) == (5 if step else 6), "nothing waited while there was room for the next layer"
    on_device = []
    for taken in (1000, 2000, 3000):
        lanes.taken = weights + taken
        assert lanes.used() <= weights + 3000, "there is room for the layer, which takes it before it ends"
        moving.layer_ended()
        on_device.append(len(lanes.here))
    assert on_device == [2, 0, 0]
    moving.come(loads)
    for taken in (2000, 1000, 0):
        lanes.taken = weights + taken
        moving.layer_ended()
        on_device.append(len(lanes.here))
    assert on_device[3:] == [2, 5, 6]
    before = lanes.fetches
    moving.run((load, add) for load in loads)
    assert lanes.fetches == before, "all were there"
    moving.settle()
    assert [load[0]["value"].unique().item() for load in loads] == [3, 4, 5, 6, 7, 8]
    assert lanes.most <= weights + 3000


def test_what_is_back_is_freed_at_once() -> None:
    """As on a CPU, where all is back at once: no second copy of all states is left."""
    lanes = LateLanes(random.Random(0))
    lanes.draw.random = lambda: 0.0  # type: ignore[method-assign,union-attr]
    moving, loads = by_hand(lanes), loads_of(9)
    moving.layer_ended()
    moving.run((load, add) for load in loads)
    assert not moving._going and lanes.most <= 3 * 400


def test_an_update_that_fails_leaves_nothing_for_a_later_one() -> None:
    lanes = LateLanes()
    moving, loads = by_hand(lanes), loads_of(4)
    leave_room(moving, lanes, 5000)
    moving.come(loads)
    moving.layer_ended()

    def fail(copies: Sequence[Tensors]) -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        moving.run([(loads[0], add), (loads[1], fail), *((load, add) for load in loads[2:])])
    assert not moving._ahead and not lanes.here
    moving.run((load, add) for load in loads)
    moving.settle()
    assert [load[0]["value"].unique().item() for load in loads] == [2, 2, 3, 4]


def test_a_device_that_is_full_while_an_update_runs_waits_for_what_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = LateLanes()
    moving, loads, honest = by_hand(lanes), loads_of(6), lanes.fetch

    def full(load: Sequence[Tensors]) -> Any:
        if lanes.used() >= 3 * 400:
            raise torch.OutOfMemoryError("full")
        return honest(load)

    leave_room(moving, lanes, 10**6)
    monkeypatch.setattr(lanes, "fetch", full)
    moving.run((load, add) for load in loads)
    moving.settle()
    assert [load[0]["value"].unique().item() for load in loads] == [1, 2, 3, 4, 5, 6]


def test_what_a_pass_takes_beyond_its_layers_is_left_free() -> None:
    lanes = LateLanes()
    moving, loads = by_hand(lanes), loads_of(6)
    moving._reserve = 1000
    leave_room(moving, lanes, 3000)
    moving.come(loads)
    moving.layer_ended()
    assert lanes.used() == 2000


def test_room_that_is_given_is_used_beyond_what_steps_have_taken() -> None:
    """Nothing but what is always in use: without room of their own, loads come in their own time."""
    on_device = []
    for room in (0, 1100):
        lanes = LateLanes()
        moving, loads = by_hand(lanes), loads_of(6)
        moving._room = room
        lanes.taken = 3000
        moving.layer_ended()
        moving.come(loads)
        moving.layer_ended()
        on_device.append(len(lanes.here))
        moving.run((load, add) for load in loads)
        on_device.append(len(lanes.going))
        assert lanes.most <= 3000 + max(room, 4 * 400)
        moving.settle()
        assert [load[0]["value"].unique().item() for load in loads] == [1, 2, 3, 4, 5, 6]
    assert on_device == [0, 2, 2, 2], "two of 400 bytes fit 1,100"


def test_more_room_than_the_device_has_is_not_taken() -> None:
    lanes = LateLanes()
    lanes.size = 4000
    moving, loads = by_hand(lanes), loads_of(6)
    moving._room = 10**6
    lanes.taken = 3000
    moving.layer_ended()
    moving.come(loads)
    moving.layer_ended()
    assert lanes.used() == 3800, "two fit, and a third does not"


def test_without_room_two_loads_go_back_at_a_time() -> None:
    lanes = LateLanes()
    moving, loads = by_hand(lanes), loads_of(9)
    lanes.taken = 10**6
    moving.run((load, add) for load in loads)
    assert lanes.most == 10**6 + 4 * 400, "one that is worked on, one that comes, two that go"
    moving.settle()
    assert [load[0]["value"].unique().item() for load in loads] == list(range(1, 10))
    assert not lanes.here


def test_what_came_ahead_is_let_go_of_before_it_changes_on_the_host() -> None:
    lanes = LateLanes()
    moving, loads = by_hand(lanes), loads_of(3)
    leave_room(moving, lanes, 5000)
    moving.come(loads)
    moving.layer_ended()
    assert len(lanes.coming) == 3
    moving.forget()
    assert not lanes.here
    for load in loads:
        load[0]["value"].fill_(10.0)
    moving.run((load, add) for load in loads)
    moving.settle()
    assert all(load[0]["value"].eq(11).all() for load in loads)


def test_a_device_without_memory_for_what_might_come_ahead_gets_it_in_its_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes = LateLanes()
    moving, loads, honest = by_hand(lanes), loads_of(3), lanes.fetch

    def full(load: Sequence[Tensors]) -> Any:
        if lanes.fetches == 1:
            raise torch.OutOfMemoryError("in pieces")
        return honest(load)

    leave_room(moving, lanes, 5000)
    moving.come(loads)
    monkeypatch.setattr(lanes, "fetch", full)
    moving.layer_ended()
    moving.layer_ended()
    assert len(lanes.here) == 1
    monkeypatch.setattr(lanes, "fetch", honest)
    moving.run((load, add) for load in loads)
    moving.settle()
    assert [load[0]["value"].unique().item() for load in loads] == [1, 2, 3]


class Passes:
    """What a run's passes take of the device's memory: layers are piled up, and taken down again."""

    def __init__(self, lanes: list[LateLanes], draw: random.Random):
        self._lanes, self._draw, self._honest = lanes, draw, marks._ended

    def ended(self, device: torch.device) -> None:
        for lanes in self._lanes:
            lanes.taken = min(300_000, max(0, lanes.taken + self._draw.choice((-90_000, -60_000, 40_000, 60_000))))
        self._honest(device)


@pytest.mark.parametrize(
    ("kind", "offload", "seed"), [("adamw", "states", 0), ("adamw_8bit", "states", 1), ("muon", "all", 1)]
)
def test_a_run_is_the_same_bit_for_bit_however_late_copies_are(
    kind: str,
    offload: str,
    seed: int,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six steps in two runs, each with checkpoints, of which the second goes on from the first one's."""
    model = tiny_model("qwen3_tied")
    write_rollouts(tmp_path / "rollouts.jsonl", 40)
    monkeypatch.setattr("truestep.step.update.optimizers.by_weight._NUMBERS", 500)
    draw, made = random.Random(seed), list[LateLanes]()

    def lanes() -> LateLanes:
        made.append(LateLanes(draw))
        return made[-1]

    def run(name: str, offload: str) -> Path:
        room = {} if offload == "none" else {"offload_room": seed * 1e-4}  # GiB: some loads
        for steps in (3, 6):
            config = file_config(
                model, tmp_path / "rollouts.jsonl", tmp_path / name,
                optimizer={"type": kind, "offload": offload, "weight_decay": 0.1, **room},
                schedule={"steps": steps}, checkpoint={"every": 2},
            )  # fmt: skip
            half = merged(config.model_dump(), {"model": {"dtype": "bfloat16"}})
            quiet_trainer(Config.model_validate(half)).run()
        return latest(tmp_path / name)

    first = run("plain", "none")
    with monkeypatch.context() as late:
        moves = Moves(late)
        late.setattr(conveyor, "Here", lanes)
        late.setattr(marks, "_ended", Passes(made, draw).ended)
        second = run("late", offload)
    for read in (read_weights, read_states):
        plain, offloaded = read(first), read(second)
        assert plain.keys() == offloaded.keys()
        assert all(torch.equal(plain[key], value) for key, value in offloaded.items())
    assert len(made) == 2 and max(moves.ahead) > 1 and max(moves.going) > 2, (
        "some came in passes, and some went back in them"
    )


def test_planted_nobody_waits_for_what_is_on_its_way_back(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test above can fail: a checkpoint gets what is not there yet."""
    write_rollouts(tmp_path / "rollouts.jsonl", 40)
    monkeypatch.setattr(conveyor, "Here", LateLanes)
    monkeypatch.setattr(Conveyor, "settle", lambda _: None)
    config = file_config(
        tiny_model("qwen3_tied"), tmp_path / "rollouts.jsonl", tmp_path / "run",
        optimizer={"type": "adamw", "offload": "states"}, schedule={"steps": 1}, checkpoint={"every": 1},
    )  # fmt: skip
    said = (
        "its checkpoint would have optimizer/.* with values that are not finite. No checkpoint is written yet: begin "
    )
    with pytest.raises(SaveError, match=said):
        quiet_trainer(config).run()


def test_sampling_begins_when_all_is_back_and_another_models_passes_fetch_nothing(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 40)
    monkeypatch.setattr(conveyor, "Here", LateLanes)
    trainers = []
    for name in ("one", "other"):
        config = file_config(
            tiny_model("qwen3_tied"), tmp_path / "rollouts.jsonl", tmp_path / name,
            optimizer={"type": "adamw", "offload": "states"}, schedule={"steps": 2}, checkpoint={"every": 0},
        )  # fmt: skip
        trainers.append(quiet_trainer(config))
    one, other = (trainer.optimizer for trainer in trainers)
    assert isinstance(one, ByWeight) and isinstance(other, ByWeight)
    trainers[0].run()
    assert one._conveyor._lanes.fetches > 0 and other._conveyor._lanes.fetches == 0  # type: ignore[attr-defined]
    for number, gradient in enumerate(trainers[0].policy.weights.gradients.values()):
        gradient.fill_(number)
    one.step()
    assert one._conveyor._going
    with trainers[0].policy.weights.gathered():
        assert not one._conveyor._going
    marks.last_backward(trainers[1].policy.weights)
    assert not one._conveyor._wanted
    marks.last_backward(trainers[0].policy.weights)
    assert one._conveyor._wanted


def test_a_state_dict_is_loaded(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 40)
    config = file_config(
        tiny_model("qwen3_tied"), tmp_path / "rollouts.jsonl", tmp_path / "run",
        optimizer={"type": "adamw", "offload": "states"}, schedule={"steps": 1},
    )  # fmt: skip
    trainer = quiet_trainer(config)
    trainer.run()
    kept = trainer.optimizer.state_dict()
    count = len(trainer.optimizer.state)
    trainer.optimizer.state.clear()
    trainer.optimizer.load_state_dict(kept)
    assert len(trainer.optimizer.state) == count > 0
