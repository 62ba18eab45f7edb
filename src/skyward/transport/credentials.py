"""What looks like a credential among the user's files: by the name of a file, and by what a small text holds.

The names are those of programs that keep logins in files; the texts begin as their makers let keys begin, so that they
can be found. Neither finds everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from skyward.api.secret import looks_secret_file

__all__ = ["SCANNED", "found_in", "found_in_name"]

SCANNED = 512 << 10
"""Bytes; a larger file is not looked into."""
_TEXT = 8 << 10

# fmt: off
_DIRECTORIES = (
    ".aws", ".azure", ".docker", ".gcloud", ".gnupg", ".kube", ".oci", ".ssh", ".password-store", ".config/gcloud",
)
_FILES = (
    ".env", ".env.*", "*.env", ".envrc", "*.envrc", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".my.cnf",
    ".mylogin.cnf", ".boto", ".s3cfg", ".git-credentials", ".htpasswd", ".dockercfg", "rclone.conf", ".vault-token",
    ".terraformrc", "*.tfstate", "*.tfstate.*", "*.tfvars", "*.tfvars.json", "kubeconfig", "kubeconfig.*",
    "*.kubeconfig", "kaggle.json", ".databrickscfg", "gha-creds-*.json", "service-account*.json",
    "service_account*.json", "*serviceaccount*.json",
    "*.pem", "*.key", "*.p12", "*.p8", "*.pfx", "*.jks", "*.keystore", "*.kdb", "*.kdbx", "*.ppk", "*.ovpn", "id_*",
)
# What a credential begins with, and the whole of it. The beginnings are looked for first: that is fast.
_TEXTS: tuple[tuple[str, tuple[bytes, ...], bytes], ...] = (
    ("an access key of AWS", (b"AKIA", b"ASIA"), rb"A[KS]IA[A-Z2-7]{16}(?![A-Za-z0-9])"),
    ("a secret key of AWS", (b"aws_secret_access_key",), rb"aws_secret_access_key\s*[=:]\s*[\"']?[A-Za-z0-9/+]{40}"),
    ("a token of GitHub", (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
     rb"gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{60}"),
    ("a token of GitLab", (b"glpat-",), rb"glpat-[A-Za-z0-9_-]{20}"),
    ("a token of Hugging Face", (b"hf_",), rb"hf_[A-Za-z0-9]{30}"),
    ("a token of Slack", (b"xox", b"hooks.slack.com/services/T"),
     rb"xox[abeoprs]-[0-9]+-[A-Za-z0-9-]{8}|hooks\.slack\.com/services/T[A-Z0-9]+/B[A-Z0-9]+/[A-Za-z0-9]{20}"),
    ("a key of OpenAI or Anthropic", (b"sk-ant-", b"sk-proj-", b"sk-svcacct-", b"T3BlbkFJ"),
     rb"sk-(?:ant|proj|svcacct)-[A-Za-z0-9_-]{40}|sk-[A-Za-z0-9]{20}T3BlbkFJ[A-Za-z0-9]{20}"),
    ("a key of Google", (b"AIza", b"GOCSPX-"), rb"AIza[0-9A-Za-z_-]{35}|GOCSPX-[A-Za-z0-9_-]{28}"),
    ("a key of Stripe", (b"sk_live_", b"rk_live_"), rb"[rs]k_live_[A-Za-z0-9]{20}"),
    ("a key of SendGrid", (b"SG.",), rb"SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}"),
    ("a token of npm", (b"npm_", b"_authToken="), rb"npm_[A-Za-z0-9]{36}|_authToken=[A-Za-z0-9_-]{20}"),
    ("a token of PyPI", (b"pypi-AgE",), rb"pypi-AgE[A-Za-z0-9_-]{50}"),
    ("a key of Azure", (b"AccountKey=",), rb"AccountKey=[A-Za-z0-9+/]{80}"),
    ("a token of DigitalOcean", (b"dop_v1_",), rb"dop_v1_[a-f0-9]{64}"),
    ("a token of Databricks", (b"dapi",), rb"dapi[a-f0-9]{32}"),
    ("a token of Vault", (b"hvs.",), rb"hvs\.[A-Za-z0-9_-]{24}"),
    ("a private key", (b"PRIVATE KEY", b"AGE-SECRET-KEY-1"),
     rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:\s|\\[rn])*[A-Za-z0-9+/=:,\s\\-]{64}"
     rb"|AGE-SECRET-KEY-1[A-Z0-9]{58}"),
)
# fmt: on
_WHOLE = [(what, beginnings, re.compile(rb"(?<![A-Za-z0-9])(?:" + text + rb")")) for what, beginnings, text in _TEXTS]
_EXAMPLE = re.compile(rb"EXAMPLE|(.)\1{9}|1234567890", re.IGNORECASE)


def found_in_name(name: str) -> str | None:
    """Why a path, with "/" between its parts, looks like one of a credential; None if it does not."""
    lower = name.lower()
    parts = lower.split("/")
    for pattern in _DIRECTORIES:
        if f"/{pattern}/" in f"/{lower}/":
            return pattern
    for pattern in _FILES:
        if fnmatchcase(parts[-1], pattern):
            return pattern
    return "its name" if looks_secret_file(name.rpartition("/")[2]) else None


def found_in(data: bytes) -> str | None:
    """What the text of a file looks like, if it holds a credential; None for a file that is no text, or is large."""
    if len(data) > SCANNED or b"\0" in data[:_TEXT]:
        return None
    return next(_credentials(data), None)


def _credentials(data: bytes) -> Iterator[str]:
    for what, beginnings, whole in _WHOLE:
        if any(beginning in data for beginning in beginnings):
            for match in whole.finditer(data):
                if not _EXAMPLE.search(match[0]):
                    yield what
