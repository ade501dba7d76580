# SPDX-License-Identifier: Apache-2.0
import pytest

from pretrain.redact import MASK, is_secret_name, mask_secrets, mask_text


@pytest.mark.parametrize(
    "name",
    ["wandb_api_key", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "password", "HF_TOKEN", "token"],
)
def test_secret_names(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["tokens", "tokenizer", "tokens_per_s", "key", "num_tokens", "monkey", "keys.path"]
)
def test_ordinary_names(name):
    assert not is_secret_name(name)


def test_nested_values_are_masked_and_the_rest_is_untouched():
    given = {"log": {"api_key": "abc", "wandb": True}, "list": [{"password": "x"}, 3], "t": None}
    masked = mask_secrets(given, environ={})
    assert masked == {"log": {"api_key": MASK, "wandb": True}, "list": [{"password": MASK}, 3]} | {
        "t": None
    }
    assert given["log"]["api_key"] == "abc"


def test_values_of_secret_variables_are_masked_wherever_they_stand():
    environ = {"HF_TOKEN": "hf_0123456789", "HOME": "/home/user", "X_TOKEN": "short"}
    text = "python -m pretrain a.yaml url=s3://me:pw@host/x k=hf_0123456789 api_key=zzz home short"
    masked = mask_text(text, environ)
    assert "hf_0123456789" not in masked
    assert "pw@" not in masked
    assert "zzz" not in masked
    assert masked.startswith("python -m pretrain a.yaml url=s3://***@host/x k=*** api_key=***")
    assert masked.endswith("home short")
