"""The packaged model answers about held-out clips, from H.264 file to text, prefilled by two hosts with APB-V."""

from apbv import Engine, HostGroup, PrefillConfig, demo
from apbv.demo.clips import make_clip, questions, render, write_mp4

NUM_CLIPS = 10
NUM_SHOTS = 32


def ask_job(hosts: HostGroup, asked: list[tuple[str, str]], settings: dict) -> list[tuple[str, str]]:
    """(answer, method) of each (file, question)."""
    engine = Engine.from_pretrained("demo", hosts=hosts, prefill=PrefillConfig(**settings), dtype="float32")
    answers = [
        engine.generate(question, video=video, num_frames=2 * NUM_SHOTS, max_new_tokens=400)
        for video, question in asked
    ]
    return [(answer.text.strip(), answer.stats["method"]) for answer in answers]


def test_nine_of_ten_held_out_clips_are_answered_right(pool, tmp_path):
    """Of each task, at every clip's first question of it."""
    asked, expected = [], []
    for seed in range(NUM_CLIPS):
        clip = make_clip(1000 + seed, NUM_SHOTS, "test")
        path = str(tmp_path / f"{seed}.mp4")
        write_mp4(render(clip), path)
        by_task = {}
        for task, question, answer in questions(clip):
            by_task.setdefault(task, (question, answer))
        for task, (question, answer) in by_task.items():
            asked.append((path, question))
            expected.append((task, answer))
    assert sorted({task for task, _ in expected}) == ["counting", "describe", "ordering", "retrieval"]
    right = dict.fromkeys(dict(expected), 0)
    answers, others = pool.run(2, ask_job, asked, {})
    assert answers == others
    for (task, answer), (given, method) in zip(expected, answers, strict=True):
        assert method == "apbv"
        right[task] += given == answer
    assert all(count >= 9 for count in right.values()), right


def test_the_packaged_clip_is_answered_right_with_real_compression(pool):
    """Blocks of about 50 tokens that pass on 16 each, per layer and KV head."""
    clip = make_clip(*demo.DEMO_CLIP)
    answers = {question: answer for task, question, answer in questions(clip) if task == "retrieval"}
    assert demo.DEMO_QUESTION in answers
    asked = [(str(demo.video_path()), question) for question in answers]

    given = pool.run(2, clip_job, asked)[0]
    assert given == list(answers.values())


def clip_job(hosts: HostGroup, asked: list[tuple[str, str]]) -> list[str]:
    config = PrefillConfig(passing_len=16, anchor_len=32)
    engine = Engine.from_pretrained("demo", hosts=hosts, prefill=config, dtype="float32")
    return [engine.generate(q, video=v, num_frames=128, max_new_tokens=8).text.strip() for v, q in asked]
