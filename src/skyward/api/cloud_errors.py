"""What a cloud did not do, named by what the caller can do next; users find these in `skyward.errors`."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import indent

from skyward.api.base_errors import InvalidArgument, SkywardError

# fmt: off
__all__ = [
    "CloudError", "CloudRefused", "CredentialsExpired", "CredentialsMissing", "NoCapacity", "NoOffer",
    "NoPlace", "NoneAvailable", "NotGivenBack", "PermissionDenied", "QuotaExceeded",
]
# fmt: on


class CloudError(SkywardError):
    """Something that a cloud did not do."""


class NoOffer(CloudError, InvalidArgument):
    """Nothing that is on offer fits; says what came near and why it does not."""

    def __init__(self, wish: str, where: str, reasons: Sequence[str] = ()) -> None:
        super().__init__(wish, where, tuple(reasons))
        self.wish, self.where, self.reasons = wish, where, tuple(reasons)

    def __str__(self) -> str:
        near = "".join(f"\n  {reason}" for reason in self.reasons[:10])
        more = f"\n  ... and {len(self.reasons) - 10} more" if len(self.reasons) > 10 else ""
        return (
            f"{self.where} has nothing for {self.wish}. Nothing was created."
            + (f" Ruled out:{near}{more}\n" if near else " ")
            + "Ask for something else, another region, or another allocation"
            + (", or raise max_hourly_cost." if "max_hourly_cost" in near else ".")
        )


class NoCapacity(CloudError):
    """Everything that fits was tried, and none of it is available; nothing was left running."""

    def __init__(self, wish: str, attempts: Sequence[str]) -> None:
        super().__init__(wish, tuple(attempts))
        self.wish, self.attempts = wish, tuple(attempts)

    def __str__(self) -> str:
        tried = "".join(f"\n  {attempt}" for attempt in self.attempts)
        return (
            f"there is no capacity for {self.wish} right now; nothing was left running. Tried, in this order:{tried}\n"
            "Try again later, in another region, with another accelerator, or with "
            'allocation="spot-if-available" if only one price class was allowed.'
        )


class NoneAvailable(NoCapacity):
    """None of several specs is available; says of each why."""

    def __str__(self) -> str:
        reasons = [indent(attempt, " " * 5).lstrip() for attempt in self.attempts]
        tried = "".join(f"\n  {number}. {attempt}" for number, attempt in enumerate(reasons, 1))
        return (
            f"none of {self.wish} could be had; nothing was left running. Tried, in this order:{tried}\n"
            "Do what the lines above say, give another sky.Spec(...) to fall back on, or try again later."
        )


class NoPlace(NoCapacity):
    """A cluster of the user's has not given as many places as were asked for; nothing was left running there."""

    def __str__(self) -> str:
        return f"{self.wish}: {'; '.join(self.attempts)}. Nothing was left running."


class NotGivenBack(CloudError):
    """Things of a pool that may still exist; says what they cost and how to end them."""

    def __init__(self, pool: str, region: str, ids: Sequence[str], hourly_cost: float, cause: str) -> None:
        super().__init__(pool, region, tuple(ids), hourly_cost, cause)
        self.pool, self.region, self.ids = pool, region, tuple(ids)
        self.hourly_cost, self.cause = hourly_cost, cause

    def __str__(self) -> str:
        what = ", ".join(self.ids) if self.ids else "what a lost call may have made"
        return (
            f"pool {self.pool} is not given back yet: {what} in {self.region} may still exist "
            f"(${self.hourly_cost:,.2f} an hour). {self.cause} "
            f"Run `sky down {self.pool} --yes` to finish it; machines also end themselves when their lease runs out."
        )


class CloudRefused(CloudError):
    """A call that a cloud refused, or did not answer; `kind` sorts its codes. Providers raise subclasses."""

    def __init__(self, action: str, code: str, message: str, region: str, kind: str = "other") -> None:
        super().__init__(action, code, message, region, kind)
        self.action, self.code, self.message, self.region, self.kind = action, code, message, region, kind

    @property
    def unanswered(self) -> bool:
        """Whether the call may have been carried out all the same."""
        return self.kind == "server"

    def __str__(self) -> str:
        text = f"the provider refused {self.action} in {self.region}: {self.message} ({self.code})."
        return f"{text} {self._advice}".rstrip()

    @property
    def _advice(self) -> str:
        match self.kind:
            case "server" | "throttled":
                return "It was tried again for a while. Check the network, and the provider's status page."
            case "capacity":
                return "Try another zone, type or price class, or try later."
            case _:
                return "Check the provider's settings, and what exists in this account."


class CredentialsMissing(CloudRefused):
    """Nobody is logged in, or the cloud does not know who it is; nothing was created."""

    def __init__(
        self,
        action: str,
        code: str,
        message: str,
        region: str,
        kind: str = "credentials",
        looked_at: Sequence[str] = (),
    ) -> None:
        super().__init__(action, code, message, region, kind)
        self.looked_at = tuple(looked_at)
        self.args = (*self.args, self.looked_at)

    @property
    def _advice(self) -> str:
        looked = f"Looked at: {', '.join(self.looked_at)}. " if self.looked_at else ""
        return f"{looked}Nothing was created. Log in, or give the provider credentials that work."


class CredentialsExpired(CloudRefused):
    """The login has expired."""

    @property
    def _advice(self) -> str:
        return (
            "The login has expired. Machines end themselves when their lease runs out. Log in again, then "
            "`sky down --all --yes` gives back what is left; `sky ps` shows it."
        )


class PermissionDenied(CloudRefused):
    """The account, or the user in it, is not allowed to do this."""

    @property
    def _advice(self) -> str:
        return f"Have {self.action} allowed for this user."


class QuotaExceeded(CloudRefused):
    """A quota of the account is used up; other places in the same region would be refused as well."""

    def __init__(self, action: str, code: str, message: str, region: str, kind: str = "quota", quota: str = "") -> None:
        super().__init__(action, code, message, region, kind)
        self.quota = quota
        self.args = (*self.args, quota)

    @property
    def _advice(self) -> str:
        which = f"the quota {self.quota}" if self.quota else "the quota"
        return f"Nothing was left running. Have {which} raised, or use another region, smaller machines or fewer nodes."
