"""What counts as a secret, and what is left of a command line that holds some."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain import records
from hvdtrain.system.redaction import is_secret, redacted, without_secrets

SECRET = """
--api-key --api_key --apiKey --private-key --access-key --ssh-key --wandb-key --license-key --hub-token --hftoken
--use-token --jwt --auth --basic-auth --bearer --pass --db-pass --pat --password --passphrase --client-secret --creds
Authorization X-Api-Key PRIVATE-TOKEN trainer.logger.api_key
TF_API_KEY HVDTRAIN_TOKEN TORCH_HUB_TOKEN HF_TOKEN_2 AWS_ACCESS_KEY_ID HOROVOD_SECRET_KEY SLURM_JWT PGPASSWORD MYSQL_PWD
"""
HARMLESS = """
--pass-through --passthrough --passes --bypass --compass --path --patience --pattern --patch-size --author --auth-method
--tokens-per-batch --max-tokens --max-new-tokens --tokenizer --token-dim --pad-token --pad-token-id --token-file
--sort-key --label-key --keys --keyframe
PATH PWD OLDPWD GPG_KEY SSH_AUTH_SOCK XAUTHORITY TOKENIZERS_PARALLELISM XDG_CACHE_HOME HOROVOD_CYCLE_TIME
"""
WORDS = st.sampled_from(
    [*SECRET.split(), *HARMLESS.split(), "--token=x", "Bearer", "Authorization:", "-1", "--", "x", "https://u:p@h"]
)


def test_whole_words_of_a_name_tell_a_secret() -> None:
    assert [name for name in SECRET.split() if not is_secret(name)] == []
    assert [name for name in HARMLESS.split() if is_secret(name)] == []


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("a.py --private-key K --lr 1", "a.py --private-key *** --lr 1"),
        ("a.py --auth=K --pat K K2", "a.py --auth=*** --pat *** K2"),
        ("a.py --use-token --epochs 3", "a.py --use-token --epochs 3"),
        ("a.py --use-token -- train", "a.py --use-token -- train"),
        ("a.py --offset -1 --pass -1", "a.py --offset -1 --pass ***"),
        ("env WANDB_API_KEY=K OMP_NUM_THREADS=1 a.py", "env WANDB_API_KEY=*** OMP_NUM_THREADS=1 a.py"),
        ("a.py https://me:K@host/x --db postgres://me:K@db/x", "a.py https://***@host/x --db postgres://me:***@db/x"),
        ("a.py ssh://git@host/x --at me@host", "a.py ssh://git@host/x --at me@host"),
        ("a.py --url 'https://host/?lr=1&access_token=K&x=2'", "a.py --url 'https://host/?lr=1&access_token=***&x=2'"),
        ("curl -H 'Authorization: Bearer K' x", "curl -H 'Authorization: ***' x"),
        ("curl --header='Authorization: Bearer K' x", "curl --header='Authorization: ***' x"),
        ("curl -H Authorization: Bearer K", "curl -H Authorization: *** ***"),
        ("""a.py --json '{"lr":1, "api_key": "K L", "x": 2}'""", """a.py --json '{"lr":1, "api_key": ***, "x": 2}'"""),
        ("sh -c 'python a.py --api-key K --lr 1'", "sh -c 'python a.py --api-key *** --lr 1'"),
        ("a.py --tracker project=x,api_key=K,lr=3", "a.py --tracker project=x,api_key=***,lr=3"),
        ("a.py --strategy local-sgd:every=4+powersgd:rank=2", "a.py --strategy local-sgd:every=4+powersgd:rank=2"),
    ],
)
def test_secrets_of_a_command_line_are_hidden_and_nothing_else(line: str, kept: str) -> None:
    assert without_secrets(shlex.split(line)) == shlex.split(kept)


@given(st.lists(WORDS, max_size=6))
def test_what_is_hidden_once_is_hidden_for_good(words: list[str]) -> None:
    """Records hide it again when they are read."""
    once = without_secrets(words)
    assert without_secrets(once) == once
    assert len(once) == len(words)
    assert redacted(redacted(" ".join(words))) == redacted(" ".join(words))


def test_every_record_of_a_command_line_hides_secrets() -> None:
    settings = {"command": "a.py --api-key K --lr 1", "hub-token": "K", "WANDB_KEY": 7, "use-token": True, "lr": 0.1}
    about = {"sweep": "s", "experiment": "e", "repeat": 1, "kind": "timing", "attempt": 1, "order": 0}
    measured = {"rate_mbit": None, "rate_off_percent": None, "marked": None}
    experiment = records.Experiment(settings=settings, command=["a.py", "--jwt", "K"], **about, **measured)
    hidden = {"command": "a.py --api-key '***' --lr 1", "hub-token": "***", "WANDB_KEY": "***"}
    assert experiment.settings == settings | hidden
    assert experiment.command == ["a.py", "--jwt", "***"]
