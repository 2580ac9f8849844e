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
    generate = Engine.generate
    monkeypatch.setattr(
        Engine, "generate", lambda self, *args, **given: asked.append(given) or generate(self, *args, **given)
    )
    return asked
