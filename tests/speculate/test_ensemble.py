"""TABED: rows of a batch say what each context says alone, weights follow the paper's rule, no
token changes."""

import math
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache
from transformers.models.llava_next.modeling_llava_next import (
    get_anyres_image_grid_shape,
    unpad_image,
)

from apbv import HostGroup, ModelInputs
from apbv.config import SamplingParams
from apbv.decode.sampling import PURPOSE_DRAFT, draw, probabilities, uniform
from apbv.model.parts import inspect_model
from apbv.prefilling.encoding.vision import encode_visual
from apbv.speculate.drafters.draft import DraftTask
from apbv.speculate.drafters.tree import Tree
from apbv.speculate.strategies.ensemble import (
    AdaptedWeights,
    EnsembleDrafter,
    as_text,
    read_contexts,
)

from apbv_tests import families
from apbv_tests.configs import speculative_config
from apbv_tests.engines import CAPTION, QUESTION
from apbv_tests.prompts import processed

# ---- one batch of contexts, and each alone ----


def video_prompt(family: str) -> tuple[dict, ModelInputs]:
    """Frames of 3 x 5 tokens for M-RoPE families, so that 2 x 2 cells are ragged."""
    batch = processed(family, families.synthetic_video(6, 84, 140), QUESTION)
    parts = inspect_model(families.build_model(family, dtype=torch.float64))
    return batch, ModelInputs.from_processor(parts, batch, HostGroup.single())


def tokenizer_of(family: str):
    tokenizer = families.build_tokenizer(family)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@torch.no_grad()
def said_alone(model, input_ids, embeds, position_ids, tokens) -> torch.Tensor:
    """Logits ``[S, V]`` after each of the tokens, by the model from scratch: no batch, no mask."""
    decoder = model.get_decoder()
    new = torch.tensor([tokens])
    following = int(position_ids.flatten()[-1]) + 1 + torch.arange(len(tokens))
    position_ids = torch.cat([position_ids, following.expand(*position_ids.shape[:-1], -1)], dim=-1)
    embeds = decoder.get_input_embeddings()(input_ids) if embeds is None else embeds
    embeds = torch.cat([embeds, decoder.get_input_embeddings()(new)], dim=1)
    # Without an (empty) cache transformers takes a gap in the positions for the start of another,
    # packed sequence.
    cache = DynamicCache()
    hidden = decoder(
        inputs_embeds=embeds, position_ids=position_ids, past_key_values=cache
    ).last_hidden_state
    return model.get_output_embeddings()(hidden)[0, -len(tokens) :]


def contexts_alone(
    family: str, letters: str, batch: dict, inputs: ModelInputs, grid: tuple[int, int]
):
    """(ids, embeddings, positions) of each context, put together by other means than the
    drafter's."""
    model = families.build_model(family, dtype=torch.float64)
    parts = inspect_model(model)
    tokenize = tokenizer_of(family)
    ids = inputs.input_ids
    is_visual = inputs.input_ids[0] == inputs.input_ids[0, inputs.context_start]
    rows = encode_visual(parts, inputs.visual)
    text = model.get_decoder().get_input_embeddings()(ids).detach()
    for letter in letters:
        if letter in "TC":
            first = tokenize(f"image: {CAPTION.strip()}") if letter == "C" else tokenize("\n")
            said = torch.tensor(
                [as_text(ids[0].tolist(), is_visual.tolist(), first, tokenize("\n"))]
            )
            yield (
                said,
                None,
                torch.arange(said.shape[1]).expand(*inputs.position_ids.shape[:-1], -1),
            )
        elif letter == "P" and parts.projector is not None:
            yield pooled_before_the_projector(model, batch, inputs)
        elif letter == "M":
            yield ids, text.masked_scatter(is_visual[:, None], rows), inputs.position_ids
        else:
            frames = rows.T.reshape(rows.shape[1], -1, *grid).transpose(0, 1)
            pooled = functional.avg_pool2d(frames, 2, ceil_mode=True, count_include_pad=False)
            places = is_visual.nonzero().flatten().view(-1, *grid)[:, ::2, ::2].flatten()
            kept = torch.cat([(~is_visual).nonzero().flatten(), places]).sort().values
            embeds = text.index_copy(
                1, places, pooled.flatten(2).transpose(1, 2).flatten(0, 1)[None]
            )
            yield ids[:, kept], embeds[:, kept], inputs.position_ids[..., kept]


@torch.no_grad()
def pooled_before_the_projector(model, batch: dict, inputs: ModelInputs) -> tuple:
    """(ids, embeddings, positions) of images whose features are pooled tile by tile, in loops."""
    base = model.model
    config = model.config
    side = config.vision_config.image_size // config.vision_config.patch_size
    is_visual = inputs.input_ids[0] == config.image_token_id
    places = iter(is_visual.nonzero().flatten().tolist())
    embeds = base.get_input_embeddings()(inputs.input_ids)
    dropped: set[int] = set()
    for number, pixels in enumerate(batch["pixel_values"].double()):
        tiles = pixels if pixels.dim() == 4 else pixels[None]
        features = base.vision_tower(tiles, output_hidden_states=True).hidden_states[-2][:, 1:]
        grids = features.unflatten(1, (side, side)).movedim(-1, 1)
        means = functional.avg_pool2d(grids, 2, ceil_mode=True, count_include_pad=False)
        projected = base.multi_modal_projector(means.movedim(1, -1))  # [tiles, cells, cells, d]
        tokens = [(0, row, column) for row, column in product(range(side), range(side))]
        if pixels.dim() == 4:
            tokens += tokens_of_tiles(config, batch["image_sizes"][number], side)
        seen = set()
        for token in tokens:
            place = next(places)
            if token is None:
                embeds[0, place] = base.image_newline
                continue
            tile, row, column = token
            cell = (tile, row // 2, column // 2)
            embeds[0, place] = projected[cell]
            if cell in seen:
                dropped.add(place)
            seen.add(cell)
    kept = torch.tensor([place for place in range(len(is_visual)) if place not in dropped])
    return inputs.input_ids[:, kept], embeds[:, kept], inputs.position_ids[..., kept]


def tokens_of_tiles(config, size: torch.Tensor, side: int) -> list[tuple[int, int, int] | None]:
    """(tile, row, column) of each patch that is left of an image's tiles; None: a newline."""
    high, wide = get_anyres_image_grid_shape(
        size, config.image_grid_pinpoints, config.vision_config.image_size
    )
    places = torch.arange(high * side * wide * side).view(1, high * side, wide * side)
    tokens: list[tuple[int, int, int] | None] = []
    for line in unpad_image(places, size)[0].tolist():
        for place in line:
            row, column = divmod(place, wide * side)
            tile = 1 + row // side * wide + column // side
            tokens.append((tile, row % side, column % side))
        tokens.append(None)
    return tokens


def ensemble_of(family: str, ensemble: str, config: SamplingParams, batch=None, inputs=None):
    """A drafter in fp64; for a text family over random texts of several lengths."""
    model = families.build_model(family, dtype=torch.float64)
    parts = inspect_model(model)
    task = partial(
        DraftTask,
        target=parts,
        draft=parts,
        state=None,
        scores=None,
        hosts=HostGroup.single(),
        config=speculative_config(strategy="tabed", ensemble=ensemble),
        keep="full",
        sampling=config,
        vocab_size=parts.vocab_size,
        tokenize=tokenizer_of(family),
        caption=CAPTION.strip(),
    )
    if inputs is None:
        torch.manual_seed(0)
        texts = [
            torch.randint(0, 250, (1, length))
            for length in (31, 7, 50, 18)[: len(ensemble.rstrip("*"))]
        ]
        contexts = [(model(input_ids=ids).past_key_values, ids.shape[1]) for ids in texts]
        alone = [(ids, None, torch.arange(ids.shape[1])[None]) for ids in texts]
        return (
            model,
            EnsembleDrafter(task(inputs=SimpleNamespace(num_tokens=40, input_ids=None)), contexts),
            alone,
        )
    rows = encode_visual(parts, inputs.visual)
    everything = torch.arange(inputs.num_visual_tokens)
    task = task(inputs=inputs)
    drafter = EnsembleDrafter(task, read_contexts(task, everything, rows))
    grid = (3, 5) if parts.uses_mrope else (2, 2)
    return model, drafter, list(contexts_alone(family, ensemble, batch, inputs, grid))


def image_prompt(family: str) -> tuple[dict, ModelInputs]:
    """Two images, of which LLaVA-NeXT pads one and cuts the other into as many tiles as it can."""
    sizes = [(42, 125), (84, 84)]
    images = [families.synthetic_image(*size, seed=seed) for seed, size in enumerate(sizes)]
    batch = processed(family, *images, QUESTION)
    parts = inspect_model(families.build_model(family, dtype=torch.float64))
    return batch, ModelInputs.from_processor(parts, batch, HostGroup.single())


PROMPTS = {
    "qwen2_5_vl": video_prompt,
    "internvl": video_prompt,
    "llava": image_prompt,
    "llava_next": image_prompt,
    "llava_next_video": image_prompt,
}


@pytest.mark.parametrize("family", PROMPTS)
def test_rows_of_the_batch_say_what_each_context_says_alone(family):
    prompt = PROMPTS[family](family)
    model, drafter, alone = ensemble_of(family, "MTCP", SamplingParams(), *prompt)
    assert len({ids.shape[1] for ids, *_ in alone}) >= 3  # ragged
    logits = []
    run_contexts = drafter.run_contexts

    def noted(tokens):
        logits.append(run_contexts(tokens))
        return logits[-1]

    drafter.run_contexts = noted
    for tokens, num_new in (([5, 6, 7], 3), ([5, 6, 7, 8], 1)):
        drafter.propose(tokens, Tree.chain(1))
        rows = logits.pop()
        assert not logits and rows.shape[1] == num_new
        for row, context in zip(rows, alone, strict=True):
            expected = said_alone(model, *context, tokens)[-num_new:]
            torch.testing.assert_close(row, expected, rtol=1e-9, atol=1e-9)


# ---- weights ----


def rule_by_brute_force(ensemble: str, said: list[tuple[list, list]]) -> list[float]:
    """Algorithm 1 and Appendix B.2, in plain Python: ``said`` is (p, a q per context) of the
    past."""

    def kl(p, q):
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)

    def mix(weights, q):
        mixed = [0.0] * len(q[0])
        for weight, row in zip(weights, q, strict=True):
            mixed = [total + weight * part for total, part in zip(mixed, row, strict=True)]
        return mixed

    def divergence_from(context):
        return sum(kl(p, q[context]) for p, q in said)

    if ensemble == "MTCP*":
        errors = [max(divergence_from(context), 1e-6) for context in range(4)]
        highest = max(1 / e for e in errors)
        scores = [math.exp(1 / e - highest) for e in errors]
        return [score / sum(scores) for score in scores]

    def error(weights):
        return sum(kl(p, mix(weights, q)) for p, q in said)

    return min(([1 - j / 10, j / 10] for j in range(11)), key=error)


@pytest.mark.parametrize(
    ("ensemble", "window"), [("MT*", None), ("MTCP*", None), ("MT*", 1), ("MT*", 4), ("MTCP*", 4)]
)
def test_weights_go_by_the_divergence_from_the_target_alone(ensemble, window):
    """Also where other weights would have had the verified tokens on top more often."""
    policy = AdaptedWeights(len(ensemble) - 1, window)
    torch.manual_seed(0)
    said = []
    for _ in range(12):
        logits = 2 * torch.randn(9).double()
        noisy = logits + torch.arange(1, len(ensemble))[:, None] * torch.randn(len(ensemble) - 1, 9)
        p = torch.softmax(logits, -1)
        q = torch.softmax(noisy, -1)
        policy.learn(p, q)
        said.append((p.tolist(), q.tolist()))
        assert policy.choose().tolist() == pytest.approx(
            rule_by_brute_force(ensemble, said[-window:] if window else said), abs=1e-9
        )


@pytest.mark.parametrize(("temperature", "ensemble"), [(0.0, "MT*"), (0.8, "MTCP*"), (0.8, "MT")])
def test_drafts_are_drawn_from_the_mixture_of_what_the_contexts_say_alone(temperature, ensemble):
    """Block after block, with a rejection in the middle, weights from verified tokens only, and
    top-p."""
    torch.manual_seed(0)
    config = SamplingParams(temperature=temperature, top_p=0.7 if temperature else 1.0, seed=5)
    model, drafter, alone = ensemble_of("llama", ensemble, config)
    target = families.build_model("llama", dtype=torch.float64, seed=1)
    prompt = torch.randint(0, 250, (1, 20))
    warmth = temperature or 1.0
    said = []
    tokens = [5]
    expected_weights = [1 / len(alone)] * len(alone)
    seen = []
    for num_right in (3, 0, 2, 3):
        proposal = drafter.propose(tokens, Tree.chain(3))
        assert drafter.weights.tolist() == pytest.approx(expected_weights, abs=1e-9)
        seen.append(tuple(drafter.weights.tolist()))
        for place, token in enumerate(proposal.tokens):
            before = [*tokens, *proposal.tokens[:place]]
            rows = torch.stack([said_alone(model, *context, before)[-1] for context in alone])
            mixture = torch.tensor(expected_weights).double() @ torch.softmax(rows / warmth, -1)
            if not temperature:
                assert proposal.q is None and token == int(mixture.argmax())
                continue
            drawn_from = probabilities(mixture.log(), 1.0, config.top_p)
            torch.testing.assert_close(proposal.q[place], drawn_from, rtol=1e-7, atol=1e-9)
            assert (
                token
                == draw(
                    proposal.q[place][None], [uniform(5, 40 + len(before), PURPOSE_DRAFT)]
                ).read()[0]
            )
        new = [*proposal.tokens[:num_right], 77]
        with torch.no_grad():
            logits = target(
                input_ids=torch.cat([prompt, torch.tensor([[*tokens, *new]])], 1)
            ).logits[0]
        logits = logits[-len(new) - 1 : -1]
        drafter.learn(new, logits)
        for place in range(len(new)):
            rows = [said_alone(model, *context, [*tokens, *new[:place]])[-1] for context in alone]
            q = torch.softmax(torch.stack(rows) / warmth, -1)
            said.append((torch.softmax(logits[place] / warmth, -1).tolist(), q.tolist()))
        if ensemble.endswith("*"):
            expected_weights = rule_by_brute_force(ensemble, said)
        tokens += new
    assert (len(set(seen)) > 1) == ensemble.endswith("*")


# ---- what the contexts are made of ----


def test_text_in_place_of_runs_of_visual_tokens():
    visual = [False, True, True, False, True, True]
    assert as_text([1, 9, 9, 2, 9, 9], visual, [7, 8], [6]) == [1, 7, 8, 2, 6]
    assert as_text([9, 9, 3], [True, True, False], [6], [6]) == [6, 3]
