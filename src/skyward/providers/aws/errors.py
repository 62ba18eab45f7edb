"""What AWS refuses, by its error codes, sorted by what can be done next."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from skyward import errors

__all__ = [
    "CloudRefused",
    "CredentialsExpired",
    "CredentialsMissing",
    "Kind",
    "PermissionDenied",
    "QuotaExceeded",
    "kind_of",
    "only_errors_of_ours",
    "quota_code",
    "quota_of",
    "refusal",
]

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
    """A call that AWS did not carry out, or did not answer."""

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
    """The login to AWS has expired."""

    def __str__(self) -> str:
        return (
            f"the AWS login has expired: {self.action} in {self.region} was refused ({self.code}). "
            "Machines end themselves when their lease runs out. Log in again (`aws sso login`, or new keys), then "
            "`sky down --all --yes` gives back what is left; `sky ps` shows it."
        )


class PermissionDenied(errors.PermissionDenied):
    """The AWS account, or the user in it, is not allowed to do this."""

    def __str__(self) -> str:
        message = self.message.split(" Encoded authorization failure message")[0]
        text = f"AWS does not allow {self.action} in {self.region}: {message} ({self.code}). "
        if self.code in ("PendingVerification", "OptInRequired", "Blocked"):
            return text + "It is the account that has to be verified, or opted in: see its AWS console and e-mail."
        return text + f"Have {self.action} allowed for this user; docs/aws-policy.json lists all that Skyward needs."


class QuotaExceeded(errors.QuotaExceeded):
    """A quota of the AWS account is used up."""

    def __str__(self) -> str:
        which = f"the quota {self.quota}" if self.quota else "a quota"
        return (
            f"{which} in {self.region} does not allow this: {self.message} ({self.code} from {self.action}). "
            "Nothing was left running. Ask for more under 'Service Quotas' in the AWS console, or use another region, "
            "smaller machines or fewer nodes."
        )


def kind_of(code: str, status: int = 400) -> Kind:
    """What sort of refusal an error code of AWS is."""
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
    """The name and code of the quota that counts the vCPUs of an instance type."""
    family, code = kind.partition(".")[0], quota_code(kind, market)
    for prefixes, name, _, _ in _FAMILIES:
        if family.startswith(prefixes):
            scope = "All" if market == "spot" else "Running On-Demand"
            return f"'{scope} {name}'{f' ({code})' if code else ''}"
    return "of this instance type"


def quota_code(kind: str, market: str) -> str:
    """The code of that quota; empty where it is not known."""
    family = kind.partition(".")[0]
    found = next((codes for prefixes, _, *codes in _FAMILIES if family.startswith(prefixes)), ["", ""])
    return found[1] if market == "spot" else found[0]


def refusal(action: str, code: str, message: str, region: str, status: int = 400) -> errors.CloudRefused:
    """The error for an answer of AWS."""
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
    """Has these methods of a provider raise `CloudRefused` where an answer lacks what it should have."""

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
