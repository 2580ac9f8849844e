"""Measure how often the draft predicts the target's next token from all or a random part of the visual tokens.

    python benchmarks/agreement.py --shots 24 64 128 --keep 1.0 0.1 --clips 40

The target describes held-out clips greedily; the draft reads along, and its most likely token is compared at every
step. Kept tokens keep their positions.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from exam import Candidate, Exam, clips_folder
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from apbv import HostGroup, ModelInputs, PrefillConfig
from apbv.demo import clips, draft_path, model_path
from apbv.stats import append_json_lines


@torch.no_grad()
def predict_along(model: PreTrainedModel, inputs: ModelInputs, tokens: list[int], kept: Tensor) -> list[int]:
    """Predict each of some tokens from those before it.

    Args:
        model: a Qwen2.5-VL model on the CPU.
        inputs: the prompt, with all pixels of its video on this host.
        tokens: the tokens that follow the prompt.
        kept: ascending indices of the visual tokens that the model sees, int64.

    Returns:
        The model's most likely token at the place of each.
    """
    ids = torch.cat([inputs.input_ids, torch.tensor([tokens[:-1]], dtype=torch.long)], dim=1)
    embeds = model.get_input_embeddings()(ids)
    rows = []
    for chunk in inputs.visual.pixels.chunks([range(inputs.visual.num_temporal_patches)]):
        pixels, grid = chunk.values["pixel_values_videos"], chunk.values["video_grid_thw"]
        rows += model.model.get_video_features(pixels, grid, return_dict=True).pooler_output
    visual = torch.cat(rows)
    is_visual = (ids == model.config.video_token_id)[0]
    embeds[:, is_visual] = visual
    first = int(inputs.position_ids.flatten()[-1]) + 1
    following = torch.arange(first, first + len(tokens) - 1).expand(3, 1, -1)
    positions = torch.cat([inputs.position_ids, following], dim=-1)
    is_seen = ~is_visual
    is_seen[is_visual.nonzero()[kept, 0]] = True
    hidden = model.model.language_model(
        inputs_embeds=embeds[:, is_seen], position_ids=positions[..., is_seen], use_cache=False
    ).last_hidden_state
    return model.lm_head(hidden[0, -len(tokens) :]).argmax(-1).tolist()


def count_agreements(
    candidate: Candidate, draft: PreTrainedModel, exam: Exam, shares: Sequence[float], folder: Path
) -> tuple[dict[float, int], int]:
    """Count how many tokens of the target's descriptions the draft predicts from shares of the visual tokens.

    Args:
        candidate: the target, on one host.
        draft: the draft.
        exam: the clips.
        shares: shares of the visual tokens that the draft sees, chosen at random, at least one token.
        folder: the folder of the clips' files.

    Returns:
        The number of agreeing tokens by share, and the number of all tokens.
    """
    right, total = dict.fromkeys(shares, 0), 0
    for seed in range(exam.num_clips):
        inputs = candidate.read(exam.file(seed, folder), clips.DESCRIBE_QUESTION)
        tokens, _ = candidate.answer(inputs, PrefillConfig(method="full"), 2 * clips.MOST_DESCRIBED)
        total += len(tokens)
        num_visual = inputs.num_visual_tokens
        order = torch.randperm(num_visual, generator=torch.Generator().manual_seed(seed))
        for share in shares:
            kept = order[: max(1, round(share * num_visual))].sort().values
            said = predict_along(draft, inputs, tokens, kept)
            right[share] += sum(a == b for a, b in zip(said, tokens, strict=True))
    return right, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=model_path(), help="the target's checkpoint folder")
    parser.add_argument("--draft", type=Path, default=draft_path(), help="the draft's checkpoint folder")
    parser.add_argument("--grids", type=int, nargs="+", default=list(clips.GRIDS), choices=clips.GRIDS)
    parser.add_argument("--shots", type=int, nargs="+", default=[24, 64, 128], help="lengths of the clips")
    parser.add_argument("--keep", type=float, nargs="+", default=[1.0, 0.1], help="shares of the visual tokens")
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--split", choices=clips.SPLITS, default="test")
    parser.add_argument("--json", type=Path, help="append the figures as JSON lines")
    options = parser.parse_args()
    disable_progress_bar()
    processor = AutoProcessor.from_pretrained(options.model)
    target, draft = (
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        for path in (options.model, options.draft)
    )
    candidate = Candidate(target, processor, HostGroup.single())
    folder = clips_folder()
    for grid in options.grids:
        for num_shots in options.shots:
            exam = Exam(grid, num_shots, options.clips, ("describe",), options.split)
            right, total = count_agreements(candidate, draft, exam, options.keep, folder)
            for share in options.keep:
                record = {"grid": grid, "shots": num_shots, "clips": exam.num_clips, "split": exam.split}
                record |= {"kept": share, "right": right[share], "total": total}
                print(
                    f"{grid} x {grid}, {num_shots} shots, {share:.0%} of the visual tokens: "
                    f"{right[share] / total:.3f} of {total} tokens agree",
                    flush=True,
                )
                if options.json:
                    append_json_lines(options.json, [record])


if __name__ == "__main__":
    main()
