# SPDX-License-Identifier: Apache-2.0
import time

import pytest

from pretrain.redact import MASK, holds_secret, is_secret_name, mask_secrets, mask_text


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


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("data.train=https://store/x?token=abcdefgh", "data.train=https://store/x?token=***"),
        ("--env=WANDB_API_KEY=abcd next", "--env=WANDB_API_KEY=*** next"),
        ("u?X-Amz-Signature=12ab&Expires=3", "u?X-Amz-Signature=***&Expires=3"),
        ('{"secret": "two words", "a": 1}', '{"secret": "***", "a": 1}'),
        ("{'secret':'b'}", "{'secret':'***'}"),
        ('password="a b c" next', 'password="***" next'),
        ("curl -H Authorization: Bearer abcdefghij", "curl -H Authorization: ***"),
        ("sent Bearer abcdefghij to it", "sent Bearer *** to it"),
        ("https://abcdefghij0123456789@github.com/x", "https://***@github.com/x"),
        ("redis://:hunter2@host", "redis://***@host"),
        ("AccountName=a;AccountKey=abc==", "AccountName=a;AccountKey=***"),
        ("got hf_abcdefghij0123456789 here", "got *** here"),
        ("AKIAABCDEFGHIJKLMNOP", "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
        ("step 3: token 7 of 12, tokens: 9 lr=1e-3 git@host:x", None),
        ("ssh://git@github.com/x s3://bucket/key=value/part", None),
    ],
)
def test_secrets_in_texts(text, masked):
    """Wherever they stand: in values of other settings, quoted, in URLs, by their beginning."""
    assert mask_text(text, environ={}) == (text if masked is None else masked)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("export HF_TOKEN=$(cat /run/secrets/hf) && torchrun", False),
        ('export HF_TOKEN="$OTHER"', False),
        ("HF_TOKEN: ${OTHER}", False),
        ("export HF_TOKEN=abc", True),
        ("export HF_TOKEN=$OTHER WANDB_API_KEY=abc", True),
    ],
)
def test_a_reference_to_a_secret_is_none(text, holds):
    assert holds_secret(text) is holds


def test_long_texts_take_no_time():
    """Linear in the length: a quadratic search would take hours."""
    began = time.monotonic()
    for text in ("x" * 10**6, "a=b " * 10**5, "a" * 10**6 + "=", "://" * 10**5):
        mask_text(text, environ={})
    assert time.monotonic() - began < 60
