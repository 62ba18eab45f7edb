"""Files that look like credentials are left out of includes, and named (SEC-20)."""

from __future__ import annotations

import io
import logging
import tarfile
import time
from pathlib import Path

import pytest

from skyward.api.image import Image
from skyward.errors import InvalidArgument
from skyward.transport import includes
from skyward.transport.includes import SCANNED, found_in, found_in_name, pack

NAMES = """
    .env .ENV .env.local prod.env .envrc .netrc _netrc .pypirc .npmrc .pgpass .boto .s3cfg kaggle.json
    terraform.tfstate x.tfstate.backup prod.tfvars prod.auto.tfvars.json kubeconfig KubeConfig dev.kubeconfig
    .aws/config .docker/config.json .kube/config .ssh/known_hosts deep/.config/gcloud/x.db .git-credentials
    .htpasswd key.pem server.PEM a.key A.KEY id_rsa ID_RSA id_ed25519.pub store.jks passwords.kdbx cert.p12 cert.pfx
    x.ppk service-account.json my-serviceaccount-1.json service_account_prod.json gha-creds-1.json
    client_secret_12.json credentials credentials.json AWS-Credentials.csv secrets.yaml .streamlit/secrets.toml
    hf_token token.txt api_key.txt my-private-key.txt password.txt
""".split()
OTHERS = """
    id_map.py secrets.py tokenizer.json special_tokens_map.json added_tokens.json tokens.txt token_counts.json
    keys.json key_map.csv password.md monkey.png keyboard.json environment.yml requirements.txt env.txt main.py
    auth.json README.md secretary.txt aws/config docker/config.json pipeline.toml data.bin envrc.md author.txt
""".split()


def join(*parts: str) -> str:
    """A credential that stands in no file as such, so that nobody who searches this repository finds one."""
    return "".join(parts)


LETTERS = "a8Kd9QwErTy2ZxCvBn5MlPo1IuYtReWqAsDf6GhJkL3zXc7VbNmQ4wEr"
TEXTS = {
    "aws": join("AK", "IA", "QWERTYUIOPASDF2Z"),
    "aws session": join("AS", "IA", "QWERTYUIOPASDF2Z"),
    "aws secret": join("aws_secret_", "access_key = ", LETTERS[:40]),
    "github": join("gh", "p_", LETTERS[:36]),
    "github fine": join("github", "_pat_", LETTERS, LETTERS),
    "gitlab": join("gl", "pat-", LETTERS[:20]),
    "hugging face": join("h", "f_", LETTERS[:34]),
    "slack": join("xo", "xb-", "2468013579-abcdefghij"),
    "anthropic": join("sk-", "ant-", LETTERS),
    "openai": join("sk-", "proj-", LETTERS),
    "google": join("AI", "za", LETTERS[:35]),
    "stripe": join("sk_", "live_", LETTERS[:24]),
    "npm": join("np", "m_", LETTERS[:36]),
    "pypi": join("pypi-", "AgE", LETTERS),
    "azure": join("Account", "Key=", LETTERS, LETTERS),
    "pem": join("-----BEGIN RSA ", "PRIVATE KEY-----\n", LETTERS, "\n", LETTERS),
    "openssh": join("-----BEGIN OPENSSH ", "PRIVATE KEY-----\n", LETTERS, "\n", LETTERS),
    "service account": join('{"private_key": "-----BEGIN ', "PRIVATE KEY-----\\n", LETTERS, "\\n", LETTERS, '"}'),
}
HARMLESS = [
    join("AK", "IA", "IOSFODNN7EXAMPLE"),
    join("h", "f_", "x" * 34),
    "hf_hub_download and hf_token are names",
    "-----BEGIN PRIVATE KEY----- is how one begins",
    join("see gh", "p_", "..."),
    join("Q", "AK", "IA", "QWERTYUIOPASDF2Z"),
    "xoxo-" * 20,
    "the quick brown fox",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_credentials_are_known_in_any_case(name: str) -> None:
    """SEC-20."""
    assert found_in_name(f"project/{name}")


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_are_left_alone(name: str) -> None:
    assert name.endswith(".py") or not found_in_name(f"project/{name}")


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_of_credentials_are_known(kind: str) -> None:
    """SEC-20."""
    for text in (TEXTS[kind], f"x = '{TEXTS[kind]}'\n", f"before\n{TEXTS[kind]}\nafter"):
        assert found_in(text.encode())


@pytest.mark.parametrize("text", HARMLESS)
def test_other_texts_are_left_alone(text: str) -> None:
    assert found_in(text.encode()) is None


def test_what_is_no_text_or_large_is_not_looked_into() -> None:
    secret = TEXTS["github"].encode()
    assert found_in(b"\0" + secret) is None
    assert found_in(secret + b" " * SCANNED) is None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text("")
    return tmp_path


def sent(root: Path, **settings: list[str]) -> set[str]:
    archive = io.BytesIO()
    pack(Image(includes=["app"], **settings), root, archive)
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        return {member.name for member in tar if member.isreg()}


def test_they_are_left_out_and_the_warning_says_what_to_write(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SEC-20: the attack that worked: .envrc, prod.env, ID_RSA and others travelled, without a word."""
    for name in NAMES:
        (root / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "app" / name).write_text("x")
    (root / "app" / "notes.txt").write_text(f"for later: {TEXTS['hugging face']}\n")
    with caplog.at_level(logging.WARNING, logger="skyward.includes"):
        assert sent(root) == {"app/main.py"}
    (record,) = caplog.records
    said = record.getMessage()
    assert "allow_includes=[" in said
    assert "sky.Secret" in said
    assert "more" in said  # of so many, twenty are named
    assert TEXTS["hugging face"] not in said
    caplog.clear()
    assert sent(root, excludes=["*.*", "*_*", "credentials", "kube*", "Kube*", ".*"]) == set()
    assert caplog.records == []  # what the user leaves out is no news


def test_one_that_is_named_is_sent(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SEC-20."""
    for name in ("prod.env", "other.env", "id_map.json"):
        (root / "app" / name).write_text("x")
    (root / "app" / "notes.txt").write_text(TEXTS["github"])
    assert sent(root, allow_includes=["app/prod.env", "id_map.json"]) == {
        "app/main.py", "app/prod.env", "app/id_map.json",
    }  # fmt: skip
    assert "app/other.env" in caplog.text
    assert "app/notes.txt" in caplog.text
    caplog.clear()
    assert len(sent(root, allow_includes=["*.env", "app/notes.txt", "id_*"])) == 5
    assert caplog.records == []


def test_naming_one_in_includes_is_not_enough(root: Path) -> None:
    (root / "prod.env").write_text("x")
    with pytest.raises(InvalidArgument, match=r"allow_includes=\['prod.env'\]"):
        pack(Image(includes=["prod.env"]), root, io.BytesIO())
    pack(Image(includes=["prod.env"], allow_includes=["prod.env"]), root, io.BytesIO())


def test_a_module_is_sent_and_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SEC-20: imports would fail without it."""
    (root / "app" / "main.py").write_text(f'TOKEN = "{TEXTS["github"]}"\n')
    assert sent(root) == {"app/main.py"}
    assert "app/main.py" in caplog.text
    assert "a token of GitHub" in caplog.text
    assert TEXTS["github"] not in caplog.text


def test_looking_into_files_has_a_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(includes, "_MOST_SCANNED", 1000)
    for number in range(5):
        (root / "app" / f"{number}.txt").write_text(TEXTS["github"].ljust(600))
    assert len(sent(root)) == 4  # main.py, and what came after the limit


def test_a_tree_of_code_is_looked_into_quickly(root: Path) -> None:
    """Counted, not timed: each byte of a small file is read once; large ones are copied as before."""
    import skyward

    source = Path(skyward.__file__).parent
    whole = b"".join(path.read_bytes() for path in source.rglob("*.py"))[:SCANNED]
    began = time.perf_counter()
    for _ in range(5):
        assert found_in(whole) is None
    assert time.perf_counter() - began < 10  # 2.5 MB; takes some 50 ms
