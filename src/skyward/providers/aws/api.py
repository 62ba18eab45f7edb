"""Talking to AWS: one door for every call, where errors are translated and what may be repeated is repeated."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

from skyward.errors import CloudRefused, MissingPackage
from skyward.providers.aws.checks import check_region
from skyward.providers.aws.errors import CredentialsMissing, refusal

__all__ = ["Account", "Api", "Pace", "Report", "connect", "recalled"]

Report = Callable[[str], None]
log = logging.getLogger("skyward.aws")


@dataclass(frozen=True)
class Pace:
    """How long is waited for what, in seconds; tests of users make it quick."""

    base: float = 0.5
    """The first pause before a refused call is repeated; pauses double, with full jitter, up to `cap`."""
    cap: float = 60.0
    budget: float = 300.0
    """How long one call is repeated altogether."""
    poll: float = 2.5
    """Between two looks at the same machines."""
    settle: float = 5.0
    """Between two empty listings, after which nothing is believed to be left."""
    unanswered: float = 60.0
    """How long is watched for what a call without an answer may have made."""
    boot: float = 60.0
    """How long a machine may need until it first hears of us; no lease is shorter."""


@dataclass(frozen=True)
class Account:
    """Where calls go and as whom."""

    region: str
    profile: str | None = None
    endpoint_url: str | None = None
    timeout: float = 60.0
    pace: Pace = field(default_factory=Pace)


def recalled(pace: Mapping[str, float] | None) -> Pace:
    """The pace that a ledger speaks of, written by whatever version of this."""
    told: Mapping[str, object] = pace if isinstance(pace, Mapping) else {}  # pyright: ignore[reportUnnecessaryIsInstance] - from a file
    known = {name: told[name] for name in Pace.__dataclass_fields__ if name in told}
    return Pace(**{name: value for name, value in known.items() if isinstance(value, int | float) and 0 < value < 1e6})


def connect(account: Account, report: Report | None = None) -> Api:
    """A connection for this account; clients are made once a process and login."""
    known = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    # whoever is more or less patient shares them: making a client takes a while
    api = _connected(replace(account, pace=Pace()), tuple(sorted(known.items())), os.getpid())
    return replace(api, account=account, report=report or api.report)


@lru_cache(maxsize=16)
def _connected(account: Account, environ: tuple[tuple[str, str], ...], pid: int) -> Api:
    session = _session(account)
    check_region(session, account.region)
    return Api(account, session)


@dataclass(frozen=True)
class Api:
    """The services of one region."""

    account: Account
    session: Any
    report: Report = log.info
    clients: dict[str, Any] = field(default_factory=dict[str, Any])
    lock: Any = field(default_factory=threading.Lock)

    def call(self, service: str, operation: str, repeat: bool = True, **params: Any) -> dict[str, Any]:
        """The answer of AWS. Throttling and faults of theirs are repeated with full jitter, if `repeat`."""
        pace, began, tries = self.account.pace, time.monotonic(), 0
        while True:
            try:
                return self._once(service, operation, params)
            except CloudRefused as exc:
                left = pace.budget - (time.monotonic() - began)
                if not repeat or exc.kind not in ("throttled", "server") or left <= 0:
                    raise
                pause = min(left, random.uniform(0, min(pace.cap, pace.base * 2**tries)))
                tries += 1
                if tries == 3:  # once is nothing; this the user should know, in one line
                    self.report(f"AWS answers {exc.action} with {exc.code}; trying again for up to {left:.0f} s")
                log.debug("%s: %s, again in %.2f s", exc.action, exc.code, pause)
                time.sleep(pause)

    def pages(self, service: str, operation: str, key: str, **params: Any) -> list[dict[str, Any]]:
        """What `key` holds in all pages of an answer."""
        found: list[dict[str, Any]] = []
        token: str | None = None
        while True:
            if token is not None:
                params["NextToken"] = token
            answer = self.call(service, operation, **params)
            found += answer.get(key) or []
            token = answer.get("NextToken") or None
            if token is None:
                return found

    def identity(self) -> str:
        """Who is logged in (an ARN); the first thing asked, since it needs no permission and creates nothing.

        Who has taken on a role is known by the role: most tools name its session after the time. With single sign-on
        the session is named after the person, and many persons share the role.
        """
        if self.session.get_credentials() is None:
            raise _nobody(self.account, "no credentials were found")
        arn = str(self.call("sts", "get_caller_identity")["Arn"])
        return re.sub(r"(:assumed-role/(?!AWSReservedSSO_)[^/]+)/.*", r"\1", arn)

    def _once(self, service: str, operation: str, params: Mapping[str, Any]) -> dict[str, Any]:
        from botocore import exceptions as boto
        from botocore.parsers import ResponseParserError

        client = self._client(service)
        action = f"{service}:{client.meta.method_to_api_mapping[operation]}"
        region = self.account.region
        try:
            return getattr(client, operation)(**params)
        except boto.ClientError as exc:
            response = cast("dict[str, dict[str, Any]]", exc.response)
            error = response.get("Error", {})
            status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400))
            refused = refusal(action, str(error.get("Code", "")), str(error.get("Message", "")), region, status)
            if isinstance(refused, CredentialsMissing):
                why = f"AWS does not accept them in {region}, or {region} is not enabled for this account"
                raise _nobody(self.account, f"{why}: {refused.message} ({refused.code})") from exc
            raise refused from exc
        except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError) as exc:
            raise _nobody(self.account, str(exc)) from exc
        except (boto.TokenRetrievalError, boto.SSOError) as exc:
            raise refusal(action, "ExpiredToken", str(exc), region) from exc
        except (boto.HTTPClientError, boto.ConnectionError, ResponseParserError) as exc:
            # no answer, or half of one: whether the call was carried out is not known
            raise refusal(action, type(exc).__name__, str(exc), region, 500) from exc
        except boto.BotoCoreError as exc:
            raise refusal(action, type(exc).__name__, str(exc), region) from exc

    def _client(self, service: str) -> Any:
        from botocore.config import Config

        with self.lock:  # sessions, unlike clients, are not for several threads
            if service not in self.clients:
                # botocore would also repeat what must be tried elsewhere; repeating is done above, in one place
                config = Config(
                    retries={"total_max_attempts": 1, "mode": "standard"},
                    connect_timeout=min(10.0, self.account.timeout),
                    read_timeout=self.account.timeout,
                    user_agent_extra="skyward",
                    max_pool_connections=16,
                )
                region = "us-east-1" if service == "pricing" else self.account.region
                self.clients[service] = self.session.client(
                    service, region_name=region, endpoint_url=self.account.endpoint_url, config=config
                )
            return self.clients[service]


def _session(account: Account) -> Any:
    try:
        import boto3
    except ImportError as exc:
        raise MissingPackage("sky.AWS() needs boto3, which is not installed. Run: pip install boto3") from exc
    from botocore.exceptions import ProfileNotFound

    try:
        return boto3.Session(profile_name=account.profile, region_name=account.region)
    except ProfileNotFound as exc:
        raise _nobody(account, str(exc)) from exc


def _nobody(account: Account, why: str) -> CredentialsMissing:
    environ = os.environ
    looked = [
        f"AWS_ACCESS_KEY_ID ({'set' if environ.get('AWS_ACCESS_KEY_ID') else 'not set'})",
        f"profile {account.profile or environ.get('AWS_PROFILE') or 'default'!r} in "
        f"{environ.get('AWS_CONFIG_FILE', '~/.aws/config')} and "
        f"{environ.get('AWS_SHARED_CREDENTIALS_FILE', '~/.aws/credentials')}",
        "SSO and web identity logins",
        "the metadata services of containers and instances",
    ]
    return CredentialsMissing("sts:GetCallerIdentity", "NoCredentials", why, account.region, looked_at=looked)
