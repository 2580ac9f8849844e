"""What reduces visual tokens leaves all sound where it is."""

import torch

from apbv import HostGroup
from apbv.config import ReduceConfig

from apbv_tests import audio_files, families
from apbv_tests.families import OMNI
from apbv_tests.omni_prompts import embedded, omni_batch
from apbv_tests.oracle import as_double
from apbv_tests.prompts import prefilled, relative_error


def reduced_job(hosts: HostGroup, batch: dict, settings: dict):
    """Logits, tokens and positions of a reduced prompt."""
    state, _ = prefilled(hosts, OMNI, batch, None, settings)
    return state.logits, state.inputs.input_ids, state.inputs.position_ids


@torch.no_grad()
def test_before_the_model_sound_is_left_as_it_is(pool, tmp_path):
    """The model itself, on its own embeddings of the tokens that are left, at their own
    positions."""
    size = {"video": (0, 3), "size": (56, 84)}
    heard = audio_files.write(tmp_path / "a.mkv", [(0, 3)], "flac", audio_files.RATE, **size)
    batch = as_double(omni_batch([heard]))
    model = families.build_model(OMNI, dtype=torch.float64)
    seen = embedded(model, batch)
    settings = {"passing_len": 10**6, "reduce": ReduceConfig(method="dycoke", ratio=0.5)}
    results = pool.run(2, reduced_job, batch, settings)
    _, ids, positions = results[0]
    whole = token_places(batch["input_ids"], seen["position_ids"])
    places = {tuple(place): number for number, place in enumerate(whole)}
    left = torch.tensor([places[tuple(place)] for place in token_places(ids, positions)])
    config = model.config
    for token, share in ((config.audio_token_id, 1), (config.video_token_id, 0.5)):
        assert int((ids == token).sum()) == share * int((batch["input_ids"] == token).sum()) > 0
    hidden = model.get_decoder()(
        inputs_embeds=seen["inputs_embeds"][:, left], position_ids=seen["position_ids"][..., left]
    ).last_hidden_state
    for logits, *_ in results:
        assert relative_error(logits, model.lm_head(hidden[:, -1])) < 1e-9


def token_places(ids, positions) -> list[list[int]]:
    """Every token with its position, which no two tokens share that are alike."""
    return torch.cat([ids, positions[-3:, 0]]).T.tolist()
