"""What reduces visual tokens leaves all sound where it is."""

import audio_files
import pytest
import torch
from omni_prompts import ASKED, FRAMES, embedded, omni_batch

from apbv import Engine, HostGroup, PrefillConfig
from apbv.config import ReduceConfig

import families
from families import OMNI
from oracle import as_double
from prompts import relative_error


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    path = tmp_path_factory.mktemp("heard") / "a.mkv"
    return audio_files.write(path, [(0, 3)], "flac", audio_files.RATE, video=(0, 3), size=(56, 84))


def reduced_job(hosts: HostGroup, path: str, settings: dict):
    """Logits, tokens and positions of a reduced prompt, and how long each layer's KV is on host 0."""
    model = families.build_model(OMNI, dtype=torch.float64)
    config = PrefillConfig(passing_len=10**6, reduce=ReduceConfig(**settings))
    engine = Engine(model, families.build_processor(OMNI), hosts, config)
    state = engine.prefill(ASKED, video=path, num_frames=FRAMES)
    lengths = [layer.keys.shape[2] for layer in state.kv.cache.layers] if hosts.is_leader else None
    return state.logits, state.inputs.input_ids, state.inputs.position_ids, lengths


@torch.no_grad()
def test_before_the_model_sound_is_left_as_it_is(pool, heard):
    """The model itself, on its own embeddings of the tokens that are left, at their own positions."""
    batch, model = as_double(omni_batch([heard])), families.build_model(OMNI, dtype=torch.float64)
    seen = embedded(model, batch)
    results = pool.run(2, reduced_job, heard, {"method": "hippo", "ratio": 0.5})
    _, ids, positions, _ = results[0]
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
