"""Defines exams: held-out clips of the demo's kind as H.264 files, and what is asked about them."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from apbv import HostGroup

from .. import clips

RETRIEVALS_PER_CLIP = 2
# Answers to them are right or wrong as a whole; of a description the right tokens count.
EXACT_TASKS = ("retrieval", "ordering", "counting")


@dataclass(frozen=True)
class Exam:
    """An exam is a set of clips and the tasks that are asked about each of them.

    Args:
        grid: visual tokens per side of a frame.
        num_shots: length of the clips.
        num_clips: number of clips; their seeds are 0 to num_clips - 1.
        tasks: names of :data:`support.clips.TASKS`.
        split: the split from which the clips come.
    """

    grid: int
    num_shots: int
    num_clips: int
    tasks: tuple[str, ...] = clips.TASKS
    split: str = "test"

    def clip(self, seed: int) -> clips.ClipSpec:
        """Return the clip of a seed, with one kind of needle."""
        return clips.make_clip(seed, self.num_shots, self.split, self.grid, [self.needles(seed)])

    def needles(self, seed: int) -> str:
        """Return the kind of needle in a seed's clip; the kinds alternate."""
        return clips.NEEDLES[seed % 2]

    def file(self, seed: int, folder: Path) -> Path:
        """Return the path of a clip's file in a folder, which is written first if it is missing."""
        path = folder / f"{self.split}-{self.grid}x{self.grid}-{self.num_shots}-{seed}.mp4"
        if not path.exists():
            unfinished = path.with_suffix(".part")
            clips.write_mp4(clips.render(self.clip(seed)), unfinished)
            unfinished.replace(path)
        return path

    def shared_file(self, seed: int, folder: Path, hosts: HostGroup) -> Path:
        """Let host 0 write a clip's file if it is missing, and return its path on every host; collective."""
        with hosts.local_stage("rendering a clip"):
            if hosts.rank == 0:
                self.file(seed, folder)
        return self.file(seed, folder)

    def questions(self, seed: int) -> list[tuple[str, str, str]]:
        """Return (task, question, answer) of the first and last needle's retrieval and of all other questions."""
        asked = [item for item in clips.questions(self.clip(seed)) if item[0] in self.tasks]
        retrievals = [item for item in asked if item[0] == "retrieval"]
        others = [item for item in asked if item[0] != "retrieval"]
        return retrievals[:: max(1, len(retrievals) - 1)][:RETRIEVALS_PER_CLIP] + others


def clips_folder(chosen: Path | None = None) -> Path:
    """Return the folder for the clips' files, created if it is missing; by default a temporary one."""
    folder = chosen or Path(tempfile.gettempdir()) / "apbv-demo-clips"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
