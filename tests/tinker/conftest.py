"""A server for the tests of each file, and a tenant for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tinker.house import House, served_in


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> House:
    folder = tmp_path_factory.mktemp("tinker")
    return served_in(folder, folder / "checkpoints")


@pytest.fixture
def house(shared: House) -> Iterator[House]:
    house = shared.of("tml-alice")
    house.make()
    yield house
    house.get(f"sessions/{house.session}/finish", "POST")
    house.work()
    house.clear()
