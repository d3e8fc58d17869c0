"""Tests that need torch say so: they come first, and so in one process of `make unit`; none imports it while tests are looked for."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def with_torch(request: pytest.FixtureRequest) -> None:
    """The module's name ``torch``."""
    request.module.torch = pytest.importorskip("torch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "with_torch" not in getattr(item, "fixturenames", ()))
