"""Compare every way to read a long video: right answers against visual tokens kept and time to first token.

    python benchmarks/systems.py --clips 20 --json systems.jsonl --plot systems.png
    python benchmarks/systems.py --clips 150 --json systems.jsonl      (goes on where the file ends)
    python benchmarks/systems.py --table systems.jsonl --plot systems.png

The ways are full attention, sparse attention, reductions of the visual tokens at two ratios, Star Attention, APB
and APB-V with the papers' lengths, and speculative decoding, which loses nothing. The demo model is asked about
the same held-out clips in all of them, in turn for every question, so that a drift of the machine's speed affects
all alike. What one host computes runs on one; the rest on --hosts simulated ones (apbv.hosts.simulated). Times are
the slowest host's, on its own clock. They include reading its share of the frames and encoding it, which is done
once for all questions about a clip. With --json every clip is written as soon as it is done, and what the file has
already is not measured again.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from arguments import add_clip_options, add_json_option, add_plot_option, kept
from exam import Candidate, Exam, clips_folder, run_on
from summaries import read_records
from systems_report import plot, table
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from apbv import Engine, HostGroup, PrefillConfig, ReduceConfig, SamplingConfig, SpeculativeConfig, prefill
from apbv.config import REDUCER_NAMES, SPARSE_NAMES, SparseConfig
from apbv.demo import clips, draft_path
from apbv.hosts.simulated import share_weights
from apbv.input.model_inputs import ModelInputs
from apbv.input.rendering import render_prompt
from apbv.input.request import Question, Request
from apbv.model.parts import inspect_model
from apbv.prefilling.prefiller import ReadRequest
from apbv.speculate import Autoregressive
from apbv.speculate.turns import TakingTurns
from apbv.speculate.way import Answered
from apbv.stats import StageTimer

TASKS = ("retrieval", "ordering", "counting")
RATIOS = (0.5, 0.25)
_SPARSE_BLOCK = 32  # queries; the papers' 128 are an eighth of the demo's prompts


@dataclass(frozen=True)
class System:
    """One way to answer.

    Attributes:
        label: its name in tables and plots.
        kind: what it saves by, for the plot's colours.
        config: how prompts are prefilled.
        hosts: on how many hosts.
        speculate: how a draft proposes tokens; None: there is none.
    """

    label: str
    kind: str
    config: PrefillConfig
    hosts: int = 1
    speculate: SpeculativeConfig | None = None

    @property
    def settings(self) -> dict:
        """All settings, for a record."""
        speculate = None if self.speculate is None else asdict(self.speculate)
        return json.loads(json.dumps({"prefill": asdict(self.config), "speculate": speculate}))


def systems(num_visual: int, hosts: int) -> list[System]:
    """List what is compared, with the APB-V paper's l_a and l_p as fractions of the visual tokens.

    Args:
        num_visual: the visual tokens of a prompt.
        hosts: on how many hosts a way runs that shares a prompt out.
    """
    anchor, passing = -(-num_visual // 64), -(-num_visual // 128)
    full = PrefillConfig(method="full")
    shared = {
        "star": PrefillConfig(method="star"),
        "apb": PrefillConfig(method="apb", anchor_len=anchor, passing_len=2 * passing),
        "apbv": PrefillConfig(anchor_len=anchor, passing_len=passing),
    }
    sparse = {name: SparseConfig(method=name, block_size=_SPARSE_BLOCK) for name in SPARSE_NAMES}
    draft = SpeculativeConfig(strategy="hippo", keep_losing_draft=True)
    return [
        System("full", "exact", full),
        *(
            System(name, "sparse", PrefillConfig(method=name, sparse=blocks, on_single_host=True))
            for name, blocks in sparse.items()
        ),
        *(System(name, "hosts", config, hosts) for name, config in shared.items()),
        *(
            System(f"apbv, {name}", "hosts", replace(shared["apbv"], sparse=blocks), hosts)
            for name, blocks in sparse.items()
        ),
        *(
            System(
                f"{name}, {ratio:g}",
                "fewer tokens",
                PrefillConfig(method="full", reduce=ReduceConfig(method=name, ratio=ratio)),
            )
            for name in REDUCER_NAMES
            for ratio in RATIOS
        ),
        System(f"full, draft by hippo, {draft.keep_ratio:g}", "exact", full, speculate=draft),
    ]


class Examinee:
    """The demo pair on one of the hosts, which answers in several ways; every method is collective.

    Args:
        candidate: the target.
        draft: the draft model.
    """

    def __init__(self, candidate: Candidate, draft: PreTrainedModel):
        self._candidate, self._draft = candidate, inspect_model(draft)

    def sit(self, exam: Exam, seed: int, folder: Path, asked: list[System]) -> Iterator[dict]:
        """Answer the questions about one clip in each way; yield a record per way, equal on all hosts."""
        hosts, tokenizer = self._candidate.hosts, self._candidate.processor.tokenizer
        file = exam.shared_file(seed, folder, hosts)
        right = {system.label: {task: [0, 0] for task in exam.tasks} for system in asked}
        runs: dict[str, list[dict]] = {system.label: [] for system in asked}
        began = hosts.clock()
        first = self._candidate.read(file, exam.questions(seed)[0][1])
        reading = 1e3 * max(row[0] for row in hosts.gather_floats([hosts.clock() - began]))
        for task, text, answer in exam.questions(seed):
            inputs = self._candidate.read(file, text)
            most = len(tokenizer(answer).input_ids) + 1
            for system in asked:
                answered, figures = self._answer(system, inputs, file, text, most)
                said = tokenizer.decode(answered.tokens, skip_special_tokens=True)
                right[system.label][task][0] += said == answer
                right[system.label][task][1] += 1
                runs[system.label].append(figures)
        for system in asked:
            yield {
                "seed": seed,
                "needles": exam.needles(seed),
                "label": system.label,
                "kind": system.kind,
                "hosts": hosts.size,
                "settings": system.settings,
                "right": right[system.label],
                "reading_ms": reading,
                "ttft_ms": [figures["ttft_ms"] + reading for figures in runs[system.label]],
                "prefill_ms": [figures["ttft_ms"] for figures in runs[system.label]],
                "decode_ms": [figures["stages_ms"]["decode"] for figures in runs[system.label]],
                "num_input_tokens": first.num_tokens,
                "num_visual_tokens": first.num_visual_tokens,
                "num_visual_kept": [figures["num_visual_kept"] for figures in runs[system.label]],
            }

    def _answer(
        self, system: System, inputs: ModelInputs, file: Path, text: str, max_new_tokens: int
    ) -> tuple[Answered, dict]:
        """Answer a question greedily; return the answer, and the figures of its prefill."""
        candidate, hosts = self._candidate, self._candidate.hosts
        way = Autoregressive(candidate.parts, hosts)
        if system.speculate is not None:
            tokenize = partial(candidate.processor.tokenizer.encode, add_special_tokens=False)
            way = TakingTurns(candidate.parts, self._draft, hosts, system.speculate, tokenize)
        hosts.barrier()
        timer = StageTimer(hosts)
        request = Request(Question(text), timer, sampling=SamplingConfig(max_new_tokens=max_new_tokens))
        rendered = render_prompt(candidate.parts, candidate.processor, text, videos=[file])
        with way.session(ReadRequest(request, rendered, inputs, None)) as session:
            state = prefill(
                candidate.parts,
                inputs,
                hosts=hosts,
                config=system.config,
                timer=timer,
                observer=session.observer,
                encoded=candidate.encoded,
            )
            kept = _visual_kv(state, hosts)
            answered = session.answer(state)
        return answered, {**timer.summary(len(answered.tokens)), "num_visual_kept": kept}


def _visual_kv(state, hosts: HostGroup) -> float:
    """Count the visual tokens in a layer's KV, on average over the layers, which may have different numbers."""
    whole, num_text = state.kv.whole, state.num_tokens - state.inputs.num_visual_tokens
    lengths = [layer.keys.shape[2] for layer in whole.layers] if whole is not None else [0]
    mean = round(1e6 * (sum(lengths) / len(lengths) - num_text))
    return hosts.broadcast_ints([mean], 1)[0] / 1e6


def measure(options: argparse.Namespace, known: list[dict]) -> Iterator[dict]:
    """Yield a record for every clip and way that is not known yet."""
    engine = Engine.from_pretrained("demo", hosts=HostGroup.single(), dtype="float32")
    draft = Engine.from_pretrained(draft_path(), hosts=HostGroup.single(), dtype="float32").model
    exam = Exam(options.grid, options.shots, options.clips, TASKS, options.split)
    folder = clips_folder(options.folder)
    asked = [
        s
        for s in systems(options.shots * options.grid**2, options.hosts)
        if not options.labels or s.label in options.labels
    ]
    same = {"benchmark": "systems", "grid": options.grid, "shots": options.shots, "split": options.split}
    done = {_key(record) for record in known}
    missing = {
        seed: [
            s for s in asked if _key({**same, "seed": seed, "hosts": s.hosts, "settings": s.settings}) not in done
        ]
        for seed in range(options.clips)
    }
    with tqdm(total=sum(map(len, missing.values())), unit="way", disable=None) as bar:
        for seed, left in missing.items():
            for number in sorted({system.hosts for system in left}):
                here = [system for system in left if system.hosts == number]
                drafts = [share_weights(draft) for _ in range(number)]

                def sit(
                    hosts: HostGroup, model: PreTrainedModel, here=here, drafts=drafts, seed=seed
                ) -> list[dict]:
                    candidate = Candidate(model, engine.processor, hosts)
                    return list(Examinee(candidate, drafts[hosts.rank]).sit(exam, seed, folder, here))

                for record in run_on(number, engine, sit):
                    yield {**same, **record, "simulated": number > 1}
                bar.update(len(here))


def _key(record: dict) -> str:
    """Return what tells a measurement from others; its label may change."""
    names = ("benchmark", "grid", "shots", "split", "seed", "hosts", "settings")
    return json.dumps([record[name] for name in names], sort_keys=True)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clips", type=int, default=20)
    parser.add_argument("--shots", type=int, default=256, help="length of the clips")
    parser.add_argument("--split", choices=clips.SPLITS, default="test")
    parser.add_argument("--hosts", type=int, default=8, help="simulated, for what shares a prompt out")
    parser.add_argument("--labels", nargs="+", help="only these ways")
    add_clip_options(parser)
    add_json_option(parser)
    add_plot_option(parser)
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="measure nothing: show such files")
    options = parser.parse_args(arguments)
    if options.clips < 1 or options.hosts < 2:
        parser.error("--clips must be at least 1, and --hosts at least 2")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.table:
        records = read_records(options.table)
    else:
        disable_progress_bar()
        records = read_records([options.json]) if options.json and options.json.exists() else []
        for record in measure(options, records):
            records.append(kept(record, "systems.py", options.json))
    print(table(records))
    if options.plot:
        plot(records, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
