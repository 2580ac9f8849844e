"""Qwen2.5-Omni's thinker: how it is found in a checkpoint, and what its audio tower encodes
apart."""

import json
from itertools import chain

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

from apbv import HostGroup
from apbv.errors import UnsupportedModelError
from apbv.input.prompts.audio_input import AudioInput, audio_from_batch
from apbv.model.families import base as families_module
from apbv.model.loading.load import load_model, read_config
from apbv.model.parts import inspect_model
from apbv.prefilling.encoding.audio import audio_rows, encode_audio

from apbv_tests import families
from apbv_tests.families import MEL_BINS, OMNI
from apbv_tests.pairs import each_choice


@pytest.fixture(scope="module")
def whole_checkpoint(tmp_path_factory):
    """A checkpoint as the hub has it: names of its weights and of its configs, a talker beside the
    thinker."""
    folder = tmp_path_factory.mktemp("omni")
    thinker = families.build_model(OMNI)
    weights = {"talker.model.norm.weight": torch.ones(3), "token2wav.any.weight": torch.ones(2)}
    for name, value in thinker.state_dict().items():
        name = name.removeprefix("model.").replace("language_model.", "model.")
        weights[f"thinker.{name}"] = value.to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = tf.Qwen2_5OmniConfig(thinker_config=families.build_config(OMNI).to_dict())
    config.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    saved["dtype"] = "bfloat16"
    saved["thinker_config"].pop("dtype", None)
    saved["thinker_config"]["text_config"] |= {"eos_token_id": None, "dtype": None}
    (folder / "config.json").write_text(json.dumps(saved))
    families.build_processor(OMNI).save_pretrained(folder)
    return folder


def test_of_a_whole_checkpoint_the_thinker_is_loaded(whole_checkpoint):
    config = read_config(whole_checkpoint)
    assert config.model_type == OMNI
    model, processor = load_model(whole_checkpoint, "auto", HostGroup.single("cpu"))
    assert type(model) is tf.Qwen2_5OmniThinkerForConditionalGeneration
    assert model.dtype == torch.bfloat16
    for name, weight in families.build_model(OMNI).state_dict().items():
        assert torch.equal(model.state_dict()[name], weight.to(torch.bfloat16)), name
    parts = inspect_model(model)
    assert parts.hears and parts.eos_token_ids == (processor.tokenizer.eos_token_id,)


def test_what_is_refused(monkeypatch):
    model = families.build_model(OMNI)
    model.config.model_type = "qwen2_5_omni"
    with pytest.raises(UnsupportedModelError, match=r"apbv runs the thinker \(model\.thinker\)"):
        inspect_model(model)
    monkeypatch.setattr(families_module, "release", lambda package: (5, 22))
    with pytest.raises(UnsupportedModelError, match=r"need transformers 5\.23 or later, not 5\.22"):
        inspect_model(families.build_model(OMNI))
    inspect_model(families.build_model("qwen2_5_vl"))


def audio_of(model, lengths: tuple[int, ...], hosts: HostGroup) -> tuple[AudioInput, torch.Tensor]:
    """Sounds of so many spectrogram frames, and what the model makes of all of them at once."""
    generator = torch.Generator().manual_seed(len(lengths))
    features = torch.randn(
        len(lengths), MEL_BINS, max(lengths), generator=generator, dtype=torch.float64
    )
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        rows = model.model.get_audio_features(
            features, feature_attention_mask=mask
        ).last_hidden_state
    parts = inspect_model(model)
    batch = {"input_features": features, "feature_attention_mask": mask}
    return audio_from_batch(
        parts, batch, torch.full((len(rows),), parts.audio_token_id), hosts
    ), rows


@each_choice(lengths=[(203,), (41,), (80, 37, 3), (400, 399)], window=[20, 5, 5])
def test_units_of_sound_are_encoded_apart_as_together(lengths, window):
    """Also the last one, whatever is left for it; windows of 5 are odd, so that pooling crosses
    their edges."""
    model = families.build_model(OMNI, dtype=torch.float64)
    model.model.audio_tower.n_window = model.config.audio_config.n_window = window
    audio, expected = audio_of(model, lengths, HostGroup.single("cpu"))
    parts = inspect_model(model)
    assert parts.audio_unit == {20: 40, 5: 20}[window]
    torch.testing.assert_close(encode_audio(parts, audio), expected, rtol=1e-9, atol=1e-12)
    one_by_one = [range(unit, unit + 1) for unit in audio.units[0]]
    assert len(one_by_one) == sum(-(-length // parts.audio_unit) for length in lengths)
    pieces = list(audio_rows(parts, audio, None, one_by_one))
    assert [len(piece) for piece in pieces] == [len(audio.rows_of(unit)) for unit in one_by_one]
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-9, atol=1e-12)
    assert list(chain.from_iterable(audio.chunks(0))) == list(audio.units[0])
