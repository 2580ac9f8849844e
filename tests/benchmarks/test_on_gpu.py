"""The stages of benchmarks/on_gpu.py: each by itself, for a limited time, and a second call goes
on."""

import json
import time
from dataclasses import replace

import on_gpu
import pytest
from on_gpu import Stage


def ended(folder) -> dict[str, object]:
    lines = (folder / "stages.jsonl").read_text().splitlines()
    assert len(lines) == len({json.loads(line)["stage"] for line in lines})
    return {record["stage"]: record["status"] for record in map(json.loads, lines)}


def python(name: str, code: str, seconds: float = 60.0, **options) -> Stage:
    return Stage(name, seconds, f'python -c "{code}"', records=False, **options)


def test_every_stage_ends_and_a_second_call_goes_on(tmp_path, monkeypatch, capsys):
    told = tmp_path / "told"
    beside = [
        python("asks", f"import os\nwhile not os.path.exists('{told}'): pass", group="checks"),
        python("tells", f"open('{told}', 'w')", group="checks"),
    ]
    alone = [
        python("fails", "raise SystemExit(3)"),
        python("endless", "import time; time.sleep(600)", 1.0),
        Stage("missing", 60.0, "no-such-program"),
        python("prints", "print('| a table |')"),
    ]
    monkeypatch.setattr(on_gpu, "STAGES", [*beside, *alone])
    options = ["--out", str(tmp_path), "--minutes", "20"]
    assert on_gpu.main(options) == 1
    expected = {
        "asks": 0,
        "tells": 0,
        "fails": 3,
        "endless": "over",
        "missing": "missing",
        "prints": 0,
    }
    assert ended(tmp_path) == expected
    assert (
        "## prints" in capsys.readouterr().out
        and "| a table |" in (tmp_path / "report.md").read_text()
    )

    late = python("late", "import time; time.sleep(600)", 1e6)
    on_gpu.run(late, on_gpu.parse_arguments(options), time.monotonic() + 1)
    assert "late" not in ended(tmp_path)
    monkeypatch.setattr(on_gpu, "STAGES", [*beside, *alone, python("late", "pass")])
    assert on_gpu.main(options) == 1  # some failed
    assert ended(tmp_path) == {**expected, "late": 0}


@pytest.mark.thorough
def test_all_stages_are_rehearsed(tmp_path, monkeypatch):
    """However long they take on a machine that does other things, too."""
    monkeypatch.setattr(on_gpu, "STAGES", [replace(stage, seconds=3600) for stage in on_gpu.STAGES])
    on_gpu.main(["--rehearse", "--minutes", "60", "--out", str(tmp_path)])
    found = ended(tmp_path)
    # compute-sanitizer is only there beside a GPU's compiler.
    assert found.pop("memcheck") in ("missing", 0)
    assert set(found.values()) == {0}, [path.read_text()[-2000:] for path in tmp_path.glob("*.log")]
    pretrained = [stage for stage in on_gpu.STAGES if "{model}" in stage.command]
    assert len(pretrained) == 4 and len(found) == len(on_gpu.STAGES) - len(pretrained) - 1
