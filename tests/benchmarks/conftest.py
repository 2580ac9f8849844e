"""What tests of the benchmarks of questions share."""

import pytest

from apbv import Engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("demo")


@pytest.fixture
def prompts(monkeypatch) -> list[dict]:
    """What the engine is asked."""
    asked = []
    begin = Engine.begin
    monkeypatch.setattr(
        Engine,
        "begin",
        lambda self, request: asked.append(vars(request.question)) or begin(self, request),
    )
    return asked
