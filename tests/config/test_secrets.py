"""Secrets are recognised by name, by look and by the environment; innocent settings and sentences are left alone."""

import logging
import sys

import pytest

from canzona_cli.config.secrets import (
    HIDDEN,
    RedactingFormatter,
    is_secret_name,
    redact,
    secret_problems,
    shown_value,
)

SECRETS = (
    "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "ghp_0123456789abcdefghijABCDEFGHIJ",
    "AKIAIOSFODNN7EXAMPLE",
    "sk-proj-0123456789abcdefghijklmn",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
)


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "token", "WANDB_API_KEY", "apiKey", "api-key", "AWS_SECRET_ACCESS_KEY", "db_password", "key"),
        *("SLURM_JWT", "credentials", "PRIVATE_KEY_PEM", "options.secret", "authToken", "PGPASSWORD_OLD_PASSWORD"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("experts_per_token", "tokenizer", "batch_tokens", "num_key_value_heads", "monkey", "keyboard", "key_dim"),
        *("TOKENIZERS_PARALLELISM", "SSH_KEY_PATH", "secret_name", "TOKEN_COUNT", "password_file", "SSH_AUTH_SOCK"),
        "",
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize("secret", SECRETS)
def test_what_looks_like_a_secret_is_hidden_wherever_it_stands(secret: str) -> None:
    text = redact(f"cannot log in with {secret}, giving up")
    assert text == f"cannot log in with {HIDDEN}, giving up"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:hunter2@host/x", f"https://me:{HIDDEN}@host/x"),
        ("s3://:hunter2@host", f"s3://:{HIDDEN}@host"),
        ("optimizer.options.api_key=hunter2", f"optimizer.options.api_key={HIDDEN}"),
        ("--password=hunter2 --seed=1", f"--password={HIDDEN} --seed=1"),
        ('{"password": "hunter2"}', f'{{"password": "{HIDDEN}"}}'),
        ("token=hunter2", f"token={HIDDEN}"),
    ],
)
def test_a_password_in_an_address_or_behind_its_name_is_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "data.tokenizer=byte, train.batch_tokens=1024 at 127.0.0.1:29500",
        "write `key: value` lines; did you mean KEY=VALUE?",
        "tokens per second: 1200; loss per token: 2.5; an unknown token: <|x|>",
        "https://host:8080/path?user=a@b",
        "password: 12.5",
    ],
)
def test_sentences_stay_as_they_are(text: str) -> None:
    assert redact(text) == text


def test_values_of_secret_variables_are_hidden_also_where_nothing_else_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", "qwertyuiop")
    monkeypatch.setenv("PLANTED_PASSWORD", "qwertyuiop-and-more")
    monkeypatch.setenv("PLANTED_SHORT_TOKEN", "the")
    monkeypatch.setenv("PLANTED_COUNT_SECRET", "100000000")
    assert redact("the qwertyuiop of qwertyuiop-and-more 100000000") == f"the {HIDDEN} of {HIDDEN} 100000000"
    (problem,) = secret_problems({"run": {"dir": "/tmp/qwertyuiop/x"}})
    assert problem.key == "run.dir"
    assert "environment variable" in problem.reason


def test_settings_with_secrets_are_named_without_showing_them() -> None:
    tree = {
        "description": f"mine {SECRETS[0]}",
        "optimizer": {"options": {"api_key": "hunter2", "key": 5, "nested": ["fine", "https://a:hunter2@b"]}},
        "data": {"path": "/data/tokens", "tokenizer": "byte"},
    }
    found = {problem.key: problem for problem in secret_problems(tree)}
    assert found.keys() == {"description", "optimizer.options.api_key", "optimizer.options.nested"}
    for problem in found.values():
        said = f"{problem.value} {problem.reason} {problem.fix}"
        assert "hunter2" not in said
        assert SECRETS[0] not in said
        assert "config.yaml" in problem.reason
    assert problem.fix


def test_a_value_is_hidden_by_the_name_of_its_setting() -> None:
    assert shown_value("wandb.api_key", "hunter2") == HIDDEN
    assert shown_value("train.steps", 5) == 5
    assert shown_value("data.path", "/a") == "/a"
    assert shown_value("data.path", None) is None


def test_tracebacks_in_logs_are_without_secrets() -> None:
    formatter = RedactingFormatter("%(message)s")
    try:
        raise ValueError(f"no access with {SECRETS[0]}")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "rank %d failed", (2,), sys.exc_info())
    text = formatter.format(record)
    assert "rank 2 failed" in text
    assert "Traceback" in text
    assert SECRETS[0] not in text
