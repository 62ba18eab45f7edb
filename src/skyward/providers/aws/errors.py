"""What AWS refuses, by its error codes, sorted by what can be done next."""

from __future__ import annotations

from typing import Literal

from skyward.errors import CloudRefused, CredentialsExpired, CredentialsMissing, PermissionDenied, QuotaExceeded

__all__ = ["Kind", "kind_of", "quota_of", "refusal"]

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
    family = kind.partition(".")[0]
    for prefixes, name, demand, spot in _FAMILIES:
        if family.startswith(prefixes):
            code = spot if market == "spot" else demand
            said = "All" if market == "spot" else "Running On-Demand"
            return f"'{said} {name}'{f' ({code})' if code else ''}"
    return "of this instance type"


def refusal(action: str, code: str, message: str, region: str, status: int = 400) -> CloudRefused:
    """The error for an answer of AWS."""
    kind = kind_of(code, status)
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
