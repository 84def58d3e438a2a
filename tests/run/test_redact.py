"""Nothing that looks like a secret is written down, and text that only sounds like a secret stays readable."""

import pytest

from dtrain.run.metadata import REDACTED, Redactor, make_redactor

SECRET = "s3cr3t-Xq9-value-71"
GITHUB = "ghp_" + "aB3" * 12
JWT = "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2QT4"

COMMANDS = {
    "option": ["train.py", "--token", SECRET],
    "option with equals": ["train.py", f"--token={SECRET}"],
    "api key": ["train.py", "--api-key", SECRET],
    "camel case": ["train.py", f"--apiKey={SECRET}"],
    "password": ["train.py", f"--db.password={SECRET}"],
    "hydra": ["train.py", f"logger.wandb.api_key={SECRET}"],
    "quoted": ["train.py", "--set", f'secret="{SECRET}"'],
    "json": ["train.py", "--config", f'{{"auth_token": "{SECRET}", "lr": 1}}'],
    "header": ["train.py", "--header", f"X-Api-Key: {SECRET}"],
    "bearer": ["train.py", "--header", f"Authorization: Bearer {SECRET}"],
    "basic": ["train.py", "--say", f"Basic {SECRET}"],
    "url with a password": ["train.py", f"https://me:{SECRET}@host/path"],
    "url with a token": ["train.py", f"https://{SECRET}@host/path"],
    "database": ["train.py", f"postgresql://me:{SECRET}@host:5432/runs"],
    "query": ["train.py", f"https://host/file?sig={SECRET}&x=1"],
    "signed": ["train.py", f"s3://bucket/key?X-Amz-Signature={SECRET}"],
    "libpq": ["train.py", f"host=db password={SECRET} user=me"],
    "definition": ["train.py", f"-Dauth={SECRET}"],
    "client secret": ["train.py", "--oauth-client-secret", SECRET],
    "any character": ["train.py", f"--password=a,b;{SECRET}"],
    "spaces": ["train.py", f"--passphrase=one two {SECRET}"],
    "several": ["train.py", "--api-keys", "first", SECRET],
    "hydra, added": ["train.py", f"++logger.token=a,{SECRET}"],
    "url with an at sign": ["train.py", f"postgresql://me:p@{SECRET}@host/db"],
    "url with a slash": ["train.py", f"s3://me:p/{SECRET}@host"],
    "from a variable": ["train.py", "--resume", f"runs/{SECRET}/x"],
}
SHAPES = {
    "github": GITHUB,
    "hugging face": "hf_" + "aB3" * 12,
    "amazon": "AKIAIOSFODNN7EXAMPLE",
    "openai": "sk-" + "aB3" * 12,
    "slack": "xoxb-123456789012-123456789012-abcdefABCDEF",
    "jwt": JWT,
    "pem": "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----",
}
HARMLESS = [
    "--lr=3e-4",
    "--max-tokens=4096",
    "--tokenizer=gpt2",
    "--pad_token_id=0",
    "--key-dim=64",
    "--keep-every=10",
    "s3://bucket/runs/gpt",
    "sftp://me@host/runs",
    "--one-pass=true",
    "a=b",
    "KeyError: 'lr'",
    "skip_first_evaluation_batches_2",
    "hf_transformers_of_version_4",
    "--tokens-per-step=1e6",
    "--sort-keys=yes",
    "C:/data",
    "2026-01-01T10:00:00",
    "http://localhost:5000/data@v2",
    "https://host/data@v2",
]


@pytest.mark.parametrize("name", COMMANDS)
def test_secret_in_command_line_is_redacted_with_and_without_known_value(name):
    words = COMMANDS[name]
    shown = make_redactor((), {"WANDB_API_KEY": SECRET}).redact_command(words)
    assert SECRET not in " ".join(shown)
    assert REDACTED in " ".join(shown)
    assert len(shown) == len(words)
    assert name == "from a variable" or SECRET not in " ".join(Redactor().redact_command(words))


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES)
def test_token_shaped_text_is_redacted(text):
    assert Redactor().redact_text(f"use {text} here") == f"use {REDACTED} here"


@pytest.mark.parametrize("word", HARMLESS)
def test_harmless_words_are_not_redacted(word):
    words = ["train.py", word, "--steps", "10"]
    assert make_redactor((), {"HOME": "/home/ann/x1"}).redact_command(words) == words


def test_settings_are_redacted_at_any_depth():
    settings = {
        "lr": 0.1,
        "hub": {"token": SECRET, "name": "gpt"},
        "auth": {"user": "me", "code": SECRET},
        "urls": [f"https://me:{SECRET}@host"],
        "password": 1234,
        "head": {"key_dim": 64, "token_dropout": 0.1, "sort_key": None},
    }
    shown = Redactor().redact_data(settings)
    assert SECRET not in repr(shown)
    assert shown == {
        "lr": 0.1,
        "hub": {"token": REDACTED, "name": "gpt"},
        "auth": REDACTED,
        "urls": [f"https://me:{REDACTED}@host"],
        "password": REDACTED,
        "head": {"key_dim": 64, "token_dropout": 0.1, "sort_key": None},
    }


def test_command_line_inside_settings_is_redacted():
    assert Redactor().redact_data({"more": ["--password", SECRET, "--lr=1"]}) == {"more": ["--password", REDACTED, "--lr=1"]}


@pytest.mark.parametrize("text", ["a", "a-", "1", "a=", "a://", "token="], ids=repr)
def test_long_text_is_redacted_in_linear_time(text):
    long = text * (200_000 // len(text))  # with each letter anew it would take a quarter of an hour
    shown = Redactor().redact_data({"vocabulary": long, "token": f"{long}!"})
    assert shown["token"] == REDACTED
    assert shown["vocabulary"] == ("token=" + REDACTED if text == "token=" else long)


def test_variables_are_redacted_by_name_and_content():
    environment = {
        "HF_TOKEN": SECRET,
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HTTPS_PROXY": f"http://me:{SECRET}@proxy",
        "SLURM_JOBID": "7",
    }
    shown = make_redactor((), environment).redact_variables(environment)
    assert shown == {
        "HF_TOKEN": REDACTED,
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HTTPS_PROXY": f"http://me:{REDACTED}@proxy",
        "SLURM_JOBID": "7",
    }


def test_pwd_variable_is_not_a_secret():
    assert make_redactor((), {"PWD": "/home/me/gpt-2"}).redact_text("/home/me/gpt-2/runs") == "/home/me/gpt-2/runs"
    assert (
        make_redactor((), {"PWD": "/home/me/gpt-2", "OLDPWD": "/home/me/gpt-2"}).redact_text("/home/me/gpt-2")
        == "/home/me/gpt-2"
    )
    assert make_redactor((), {"DB_PWD": "hunter-2-hunter"}).redact_text("hunter-2-hunter") == "[redacted]"


def test_user_patterns_are_redacted_for_any_value():
    secret = make_redactor(["internal_*"], {})
    assert secret.redact_data({"internal_id": 7, "external_id": 7}) == {"internal_id": REDACTED, "external_id": 7}
    assert secret.redact_command(["--internal_id", "7", "--internal_name=x"]) == [
        "--internal_id",
        REDACTED,
        f"--internal_name={REDACTED}",
    ]
