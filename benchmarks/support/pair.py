"""Lets the demo pair's draft read a clip as it does in speculative decoding, and predict."""

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from transformers import PreTrainedModel

from apbv import ModelInputs, PrefillConfig, PrefillResult, SamplingParams, SpeculativeConfig, prefill
from apbv.demo import draft_path
from apbv.speculate.draft import DraftTask
from apbv.speculate.strategies import keep_policy, make_watcher

from .exams import Candidate, load_demo


class Pair:
    """A target and a draft on one host: the demo's, or a model that is both."""

    def __init__(self, model: str = "demo", dtype: str | None = None):
        engine = load_demo(model, dtype=dtype)
        draft = load_demo(draft_path()).model if model == "demo" else engine.model
        self.target, self.draft = Candidate(engine.model, engine.processor, engine.hosts, draft), draft

    def prefill(
        self, inputs: ModelInputs, config: SpeculativeConfig, seed: int = 0
    ) -> tuple[PrefillResult, DraftTask]:
        """Prefill the target with the watcher of a drafting strategy; also return the draft's task.

        Args:
            seed: of random choices.
        """
        target, draft, hosts = self.target.parts, self.target.draft, self.target.hosts
        watcher, full = make_watcher(config, target), PrefillConfig(method="full")
        state = prefill(target, inputs, hosts=hosts, config=full, watcher=watcher, encoded=self.target.encoded)
        task = DraftTask(
            target=target,
            draft=draft,
            inputs=inputs,
            state=state,
            scores=watcher and watcher.result,
            hosts=hosts,
            config=config,
            keep=keep_policy(config),
            sampling=SamplingParams(seed=seed),
            vocab_size=min(target.vocab_size, draft.vocab_size),
            leave_last=True,  # so that the draft gives the answer's first token, too
        )
        return state, task


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
