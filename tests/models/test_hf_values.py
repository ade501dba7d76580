# SPDX-License-Identifier: Apache-2.0
"""What a config.json means: as transformers reads it, where it is silent too; or it is refused."""

import dataclasses
import json

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from fused_ops.errors import ConfigError
from models.conversion.sections import architecture, choose_family, read_section
from models.hf_mapping import FAMILIES
from tests.models import hf_toys


def section(values):
    """The `model` section, or None where the config.json is refused."""
    try:
        return read_section(values)
    except ConfigError:
        return None


def read(values):
    """What the model computes."""
    return architecture(read_section(values))


def completed(values):
    """The same configuration with every key that transformers knows."""
    config = transformers.AutoConfig.for_model(**values)
    text = config.to_json_string(use_diff=False)
    return json.loads(text, object_hook=lambda d: float(d["__float__"]) if "__float__" in d else d)


# A toy of each family. Prediction layers that nobody announces would be tensors that nobody needs.
SILENT = {kind: name for name, (kind, _) in hf_toys.TOYS.items() if name != "nemotron_h"}
ASKED = {"num_nextn_predict_layers"}


@pytest.mark.parametrize("kind", SILENT)
def test_a_silent_config_means_what_transformers_takes(kind):
    _, toy = hf_toys.TOYS[SILENT[kind]]
    whole = completed({"model_type": kind, "num_nextn_predict_layers": 0, **toy})
    said = {k: v for k, v in whole.items() if k not in ASKED}
    assert section(said) is not None
    checked = 0
    for key in said.keys() - {"model_type"}:
        less = {k: v for k, v in said.items() if k != key}
        try:
            theirs = section({**completed(less), "num_nextn_predict_layers": 0})
        except (ValueError, StrictDataclassError):  # transformers refuses it
            continue
        ours = section(less)
        if ours is not None and theirs is not None:
            checked += 1
            assert ours == theirs or architecture(ours) == architecture(theirs), key
    assert checked > 10
    assert set(SILENT) == set(FAMILIES)


MISTRAL = {**hf_toys.DENSE, "model_type": "mistral"}
OLD_YARN = {"type": "yarn", "factor": 4.0}


def test_windows_that_a_proof_is_too_short_to_see():
    """A window is longer than the tokens of a proof: only the configuration tells."""
    assert read(MISTRAL)["window_size"] == (4095, 0)
    assert read({**MISTRAL, "sliding_window": None})["window_size"] is None
    _, toy = hf_toys.TOYS["gpt_oss"]
    silent = {k: v for k, v in toy.items() if k != "sliding_window"}
    assert read({**silent, "model_type": "gpt_oss"})["window_size"] == (127, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 5e5},
        {"rope_scaling": OLD_YARN, "original_max_position_embeddings": 64},
        {"rope_scaling": {**OLD_YARN, "original_max_position_embeddings": 64}},
        {"rope_scaling": OLD_YARN},
        {
            "rope_scaling": {"type": "linear", "factor": 4.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 7e4},
        },
    ],
)
def test_spellings_of_rotary_embeddings_count_as_in_transformers(changes):
    assert read({**MISTRAL, **changes}) == read(completed({**MISTRAL, **changes}))


DEEPSEEK = {**hf_toys.TOYS["deepseek_v3"][1], "model_type": "deepseek_v3"}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({**MISTRAL, "num_hidden_layers": "two"}, "num_hidden_layers must be a whole number of"),
        ({**MISTRAL, "vocab_size": 1.5}, "vocab_size must be a whole number of at least 1"),
        ({**MISTRAL, "hidden_size": True}, "hidden_size must be a whole number of at least 1"),
        ({**MISTRAL, "rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number, got '1e-6'"),
        ({**MISTRAL, "tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({**MISTRAL, "rope_scaling": [1]}, "rope_scaling must be a table of keys and values"),
        ({**MISTRAL, "rope_scaling": {"type": "yarn"}}, "yarn rotary embeddings must say factor"),
        ({**MISTRAL, "rope_scaling": {"type": "llama3", "factor": 2.0}}, "must say low_freq_fac"),
        ({**MISTRAL, "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ({**DEEPSEEK, "topk_group": 0}, "topk_group must be a whole number of at least 1"),
        ({**DEEPSEEK, "rope_scaling": {**OLD_YARN, "mscale": 0.7}}, "got only mscale"),
        ({**DEEPSEEK, "rope_scaling": {**OLD_YARN, "truncate": False}}, "truncate must be True"),
        ({**DEEPSEEK, "rope_scaling": {**OLD_YARN, "attention_factor": 2.0}}, "must be absent"),
    ],
)
def test_values_that_mean_nothing_here_are_named(values, says):
    with pytest.raises(ConfigError, match=says):
        read_section(values)


@pytest.mark.parametrize(
    ("change", "fields"), [({"rotary_percent": 0.5}, {}), ({}, {"mscale_all_dim": 0.1})]
)
def test_latent_attention_loses_no_setting_of_its_rotary_part(change, fields):
    given = read_section(DEEPSEEK)
    assert choose_family(given, hf_toys.VOCAB)[0].name == "deepseek_v3"
    other = dataclasses.replace(given, megatron={**given.megatron, **fields}, **change)
    (name,) = change | fields
    with pytest.raises(ConfigError, match=f"deepseek_v3: {name}: 0.[15] in the checkpoint"):
        choose_family(other, hf_toys.VOCAB)
