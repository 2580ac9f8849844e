"""The demo's clip generator and its questions."""

import itertools
import runpy

import numpy as np
import pytest

from apbv.testing import clips

from apbv_tests.scripts import BENCHMARKS
from apbv_tests.video_files import decode_all


def test_splits_share_no_scene_no_needle_and_no_placement():
    seen = {split: set() for split in clips.SPLITS}
    for split in clips.SPLITS:
        for number in range(150):
            clip = clips.make_clip(number, 8, split)
            seen[split] |= {shot.seed for shot in clip.shots} | {
                needle.seed for needle in clip.needles
            }
            placed = [
                (i, s.needle.colour, s.needle.letter) for i, s in enumerate(clip.shots) if s.needle
            ]
            seen[split].add(tuple(placed))
            assert clips.split_of(tuple(placed), 8) == split
    train, validation, test = seen.values()
    assert not train & validation and not train & test and not validation & test


def test_clip_keeps_its_rules():
    for seed, (num_shots, needles) in itertools.product(
        range(10), [(3, ["edited"]), (300, list(clips.NEEDLES))]
    ):
        clip = clips.make_clip(seed, num_shots, "validation", needles=needles)
        assert len(clip.shots) == num_shots
        assert clips.MIN_LETTERS <= len(clip.needles) <= clips.MAX_LETTERS
        for name in ("colour", "letter"):
            assert len({getattr(needle, name) for needle in clip.needles}) == len(clip.needles)
        assert {needle.kind for needle in clip.needles} <= set(needles)


def test_still_scenes_stand_and_moving_ones_move():
    grid = 2
    differences = {}
    for scene in clips.SCENES:
        for seed in range(8):
            shots = tuple(clips.Shot(seed, scene, age) for age in range(2))
            frames = clips.render(clips.ClipSpec(shots, grid)).astype(int)
            # A scene goes on where its last shot ended.
            assert not np.array_equal(frames[:2], frames[2:])
            # Smoothed, so that the noise over every frame does not count as motion.
            blocks = frames.reshape(4, grid * 7, 4, grid * 7, 4, 3).mean((2, 4))
            differences.setdefault(scene, []).append(
                np.abs(np.diff(blocks, axis=0)).max((1, 2, 3)).min()
            )
    assert min(differences["moving disc"] + differences["moving square"]) > 15
    assert max(max(v) for scene, v in differences.items() if not scene.startswith("moving")) < 15


@pytest.mark.parametrize(("grid", "kind"), [(6, "edited"), (6, "inserted")])
def test_a_needle_has_its_border_where_it_says(grid, kind):
    size = clips.TOKEN_SIZE * grid
    for seed in range(6):
        colour = list(clips.COLOURS)[seed % len(clips.COLOURS)]
        needle = clips.Needle(seed, kind, colour, "K")
        bare = clips.Shot(seed, clips.SCENES[seed % len(clips.SCENES)])
        shown = clips.Shot(bare.seed, bare.scene, 0, needle)
        frames = clips.render(clips.ClipSpec((bare, shown), grid))
        assert frames.shape == (4, size, size, 3) and frames.dtype == np.uint8
        top, left, side = clips.needle_box(needle, size)
        edge = frames[2:, top : top + 4, left : left + side].reshape(-1, 3).mean(0)
        assert (
            min(clips.COLOURS, key=lambda name: np.abs(edge - clips.COLOURS[name]).sum()) == colour
        )
        outside = np.ones((size, size), dtype=bool)
        outside[top : top + side, left : left + side] = False
        changed = np.abs(frames[2].astype(int) - frames[0])[outside].mean()
        # Edited needles leave the scene around them as it was but for its flicker.
        assert changed < 8 if kind == "edited" else changed > 8


def test_answers_follow_from_the_clip():
    for seed in range(5):
        clip = clips.make_clip(seed, 20, "test")
        asked = clips.questions(clip)
        by_task = {
            task: [(q, answer) for name, q, answer in asked if name == task] for task, *_ in asked
        }
        letters = {needle.colour: needle.letter for needle in clip.needles}
        assert {
            question.split()[-1]: answer for question, answer in by_task["retrieval"]
        } == letters
        assert by_task["ordering"][0][1].split() == list(letters.values())
        assert by_task["counting"][0][1] == str(len(letters))
        *parts, end = by_task["describe"][0][1].split(", ")
        assert end == "end" and len(parts) == 20
        assert [tuple(part.split()) for part in parts if part not in clips.SCENES] == list(
            letters.items()
        )


def test_the_render_command_writes_what_it_says(tmp_path, capsys, monkeypatch):
    options = "--out", str(tmp_path / "clip.mp4"), "--seed", "7", "--shots", "10", "--grid", "6"
    monkeypatch.setattr("sys.argv", ["render", *options])
    runpy.run_path(str(BENCHMARKS / "render.py"), run_name="__main__")
    clip = clips.make_clip(7, 10, "test", 6)
    decoded = np.stack(decode_all(tmp_path / "clip.mp4"))
    frames = clips.render(clip)
    assert decoded.shape == frames.shape and np.abs(decoded.astype(int) - frames).mean() < 8
    said = [line.strip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert said == [
        line for _, question, answer in clips.questions(clip) for line in (question, answer)
    ]
