"""Every call to AWS: translates errors, and repeats what may be repeated."""

from __future__ import annotations

import functools
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar, cast

from skyward import errors
from skyward.errors import MissingPackage
from skyward.machines.cloud import OWNER, POOL
from skyward.providers.aws.checks import check_region
from skyward.transport.backoff import backoff

__all__ = [
    "Account",
    "Api",
    "CloudRefused",
    "CredentialsExpired",
    "CredentialsMissing",
    "Kind",
    "Pace",
    "PermissionDenied",
    "QuotaExceeded",
    "Report",
    "as_dict",
    "connect",
    "filters",
    "kind_of",
    "only_errors_of_ours",
    "quota_code",
    "quota_of",
    "recalled",
    "refusal",
    "specification",
]


Report = Callable[[str], None]
log = logging.getLogger("skyward.aws")


@dataclass(frozen=True)
class Pace:
    base: float = 0.5
    """First pause before a refused call is repeated; doubles up to `cap`."""
    cap: float = 60.0
    budget: float = 300.0
    poll: float = 2.5
    settle: float = 5.0
    """Between two empty listings, after which nothing is left."""
    unanswered: float = 60.0
    boot: float = 60.0


@dataclass(frozen=True)
class Account:
    region: str
    profile: str | None = None
    endpoint_url: str | None = None
    timeout: float = 60.0
    pace: Pace = field(default_factory=Pace)


def recalled(pace: Mapping[str, float] | None) -> Pace:
    told: Mapping[str, object] = pace if isinstance(pace, Mapping) else {}  # pyright: ignore[reportUnnecessaryIsInstance] - from a file
    known = {name: told[name] for name in Pace.__dataclass_fields__ if name in told}
    return Pace(**{name: value for name, value in known.items() if isinstance(value, int | float) and 0 < value < 1e6})


def connect(account: Account, report: Report | None = None) -> Api:
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
    account: Account
    session: Any
    report: Report = log.info
    clients: dict[str, Any] = field(default_factory=dict[str, Any])
    lock: Any = field(default_factory=threading.Lock)

    def call(self, service: str, operation: str, repeat: bool = True, **params: Any) -> dict[str, Any]:
        """Repeats throttled and faulty calls with full jitter, if `repeat`."""
        pace, began = self.account.pace, time.monotonic()
        for tries, pause in enumerate(backoff(pace.base, pace.cap, jitter=random.random), 1):
            try:
                return self._once(service, operation, params)
            except errors.CloudRefused as exc:
                left = pace.budget - (time.monotonic() - began)
                if not repeat or exc.kind not in ("throttled", "server") or left <= 0:
                    raise
                if tries == 3:  # once is nothing; this the user should know, in one line
                    self.report(f"AWS answers {exc.action} with {exc.code}; trying again for up to {left:.0f} s")
                log.debug("%s: %s, again in %.2f s", exc.action, exc.code, pause)
                time.sleep(min(left, pause))
        raise AssertionError

    def pages(self, service: str, operation: str, key: str, **params: Any) -> list[dict[str, Any]]:
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
        """Who is logged in (an ARN); needs no permission.

        A role's session name is left out (most tools name it after the time), except with single sign-on.
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


Kind = Literal[
    "capacity",  # not here, not now: try the next zone, type or price class
    "quota",
    "permission",
    "credentials",
    "expired",
    "throttled",
    "server",  # their fault or the line's: the call may or may not have been carried out
    "missing",
    "duplicate",
    "in use",
    "other",
]

_SORTED: dict[Kind, str] = {
    "capacity": """InsufficientInstanceCapacity InsufficientHostCapacity InsufficientCapacity UnfulfillableCapacity
        InsufficientReservedInstanceCapacity SpotMaxPriceTooLow Unsupported UnsupportedOperation
        InsufficientFreeAddressesInSubnet PrivateIpAddressLimitExceeded ReservationCapacityExceeded""",
    "quota": """VcpuLimitExceeded InstanceLimitExceeded MaxSpotInstanceCountExceeded MaxFleetCountExceeded
        VolumeLimitExceeded MaxIOPSLimitExceeded SecurityGroupLimitExceeded KeyPairLimitExceeded
        SpotFleetRequestConfigExceeded PlacementGroupLimitExceeded RulesPerSecurityGroupLimitExceeded""",
    "permission": """UnauthorizedOperation AccessDenied AccessDeniedException OptInRequired PendingVerification
        Blocked AuthFailure.ServiceLinkedRoleCreationNotPermitted""",
    "credentials": """AuthFailure InvalidClientTokenId SignatureDoesNotMatch UnrecognizedClientException
        MissingAuthenticationToken IncompleteSignature InvalidSignatureException""",
    "expired": "ExpiredToken ExpiredTokenException RequestExpired TokenRefreshRequired",
    "throttled": """RequestLimitExceeded Throttling ThrottlingException ThrottledException RequestThrottled
        TooManyRequestsException EC2ThrottledException SlowDown BandwidthLimitExceeded""",
    "server": """InternalError ServerInternal InternalFailure InternalServerError Unavailable ServiceUnavailable
        RequestTimeout RequestTimeoutException""",
    "missing": "ParameterNotFound NoSuchEntity",
    "in use": "DependencyViolation ResourceInUse",
}
_CODES: dict[str, Kind] = {code: kind for kind, codes in _SORTED.items() for code in codes.split()}

_FAMILIES = (
    # prefix of the type, name of the quota, its code for on-demand and for spot
    (("p5", "p6"), "P5 and later instances", "L-417A185B", "L-C4BD4855"),
    (("p2", "p3", "p4", "p"), "P instances", "L-417A185B", "L-7212CCBC"),
    (("g", "vt"), "G and VT instances", "L-DB2E81BA", "L-3819A6DF"),
    (("inf",), "Inf instances", "", "L-B5D1601B"),
    (("trn",), "Trn instances", "", "L-6B0D517C"),
    (("dl",), "DL instances", "", "L-85EED4F7"),
    (("",), "Standard (A, C, D, H, I, M, R, T, Z) instances", "L-1216C47A", "L-34B43A08"),
)


class CloudRefused(errors.CloudRefused):
    def __str__(self) -> str:
        text = f"AWS did not carry out {self.action} in {self.region}: {self.message} ({self.code})."
        match self.kind:
            case "server" | "throttled":
                return f"{text} It was tried again for a while. Check the network, and AWS's status page."
            case "capacity":
                return f"{text} Try another zone, type or price class, or later."
            case _:
                return f"{text} Check what was given to sky.AWS(...) and what exists in this account."


class CredentialsMissing(errors.CredentialsMissing):
    """Nobody is logged in to AWS, or AWS does not know who it is; nothing was created."""

    def __str__(self) -> str:
        looked = f" Looked at: {', '.join(self.looked_at)}." if self.looked_at else ""
        return (
            f"no AWS login that works: {self.message}.{looked} Nothing was created. "
            "Log in (`aws configure`, `aws sso login`), set AWS_PROFILE, or give sky.AWS(profile=...)."
        )


class CredentialsExpired(errors.CredentialsExpired):
    def __str__(self) -> str:
        return (
            f"the AWS login has expired: {self.action} in {self.region} was refused ({self.code}). "
            "Machines end themselves when their lease runs out. Log in again (`aws sso login`, or new keys), then "
            "`sky down --all --yes` gives back what is left; `sky ps` shows it."
        )


class PermissionDenied(errors.PermissionDenied):
    def __str__(self) -> str:
        message = self.message.split(" Encoded authorization failure message")[0]
        text = f"AWS does not allow {self.action} in {self.region}: {message} ({self.code}). "
        if self.code in ("PendingVerification", "OptInRequired", "Blocked"):
            return text + "It is the account that has to be verified, or opted in: see its AWS console and e-mail."
        return text + f"Have {self.action} allowed for this user; docs/aws-policy.json lists all that Skyward needs."


class QuotaExceeded(errors.QuotaExceeded):
    def __str__(self) -> str:
        which = f"the quota {self.quota}" if self.quota else "a quota"
        return (
            f"{which} in {self.region} does not allow this: {self.message} ({self.code} from {self.action}). "
            "Nothing was left running. Ask for more under 'Service Quotas' in the AWS console, or use another region, "
            "smaller machines or fewer nodes."
        )


def kind_of(code: str, status: int = 400) -> Kind:
    known = _CODES.get(code)
    if known is not None:
        return known
    if status == 429:
        return "throttled"
    if status >= 500:
        return "server"
    last = code.rpartition(".")[2]
    if last in ("NotFound", "Unknown", "NotFoundException"):
        return "missing"
    if last in ("Duplicate", "AlreadyExistsException", "AlreadyExists"):
        return "duplicate"
    return "in use" if last == "InUse" else "other"


def quota_of(kind: str, market: str) -> str:
    family, code = kind.partition(".")[0], quota_code(kind, market)
    for prefixes, name, _, _ in _FAMILIES:
        if family.startswith(prefixes):
            scope = "All" if market == "spot" else "Running On-Demand"
            return f"'{scope} {name}'{f' ({code})' if code else ''}"
    return "of this instance type"


def quota_code(kind: str, market: str) -> str:
    family = kind.partition(".")[0]
    found = next((codes for prefixes, _, *codes in _FAMILIES if family.startswith(prefixes)), ["", ""])
    return found[1] if market == "spot" else found[0]


def refusal(action: str, code: str, message: str, region: str, status: int = 400) -> errors.CloudRefused:
    # an account on the free plan may use some types only: as with capacity, another one may do
    kind = "capacity" if "not eligible for Free Tier" in message else kind_of(code, status)
    if "ServiceLinkedRole" in code:  # the first spot machine of an account needs a role that AWS makes itself
        action = "iam:CreateServiceLinkedRole"
    match kind:
        case "permission":
            return PermissionDenied(action, code, message, region, kind)
        case "credentials":
            return CredentialsMissing(action, code, message, region, kind)
        case "expired":
            return CredentialsExpired(action, code, message, region, kind)
        case "quota":
            return QuotaExceeded(action, code, message, region, kind)
        case _:
            return CloudRefused(action, code, message, region, kind)


C = TypeVar("C", bound=type[Any])


def only_errors_of_ours(*methods: str) -> Callable[[C], C]:
    def wrapped(act: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(act)
        def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return act(self, *args, **kwargs)
            except errors.SkywardError:
                raise
            except (LookupError, TypeError, ValueError, AttributeError) as exc:
                what = f"an answer cannot be understood: {type(exc).__name__}: {exc}"
                raise errors.CloudRefused(act.__name__, "MalformedAnswer", what, str(self.region), "server") from exc

        return asked

    def decorated(provider: C) -> C:
        for name in methods:
            setattr(provider, name, wrapped(getattr(provider, name)))
        return provider

    return decorated


def specification(kinds: Iterable[str], tags: Mapping[str, str]) -> list[dict[str, Any]]:
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    return [{"ResourceType": kind, "Tags": pairs} for kind in kinds]


def filters(**values: Sequence[str] | str) -> list[dict[str, Any]]:
    """`pool=`, `owner=` stand for their tags, others for fields (`_` for `-`)."""
    names = {"pool": f"tag:{POOL}", "owner": f"tag:{OWNER}"}
    return [
        {"Name": names.get(key, key.replace("_", "-")), "Values": [value] if isinstance(value, str) else list(value)}
        for key, value in values.items()
    ]


def as_dict(thing: Mapping[str, Any]) -> dict[str, str]:
    tags: list[dict[str, str]] = thing.get("Tags") or []
    return {tag["Key"]: tag["Value"] for tag in tags}
